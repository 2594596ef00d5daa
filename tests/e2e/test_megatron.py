"""The main job with strategy=megatron: parts of the actor in several Ray workers, weights by plan into the rollouts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rlsys.model_merger.__main__ import main as model_merger
from tests.e2e.conftest import Toy, with_model
from trainer.main_ppo import main

MEGATRON = "actor_rollout_ref.actor.megatron"
WALL_CLOCK = ("timing", "perf/", "weights/seconds", "reward/seconds")
TP2 = ("trainer.n_gpus_per_node=2", f"{MEGATRON}.tensor_model_parallel_size=2")


def run(toy: Toy, out: Path, *more: str) -> list[dict[str, Any]]:
    """The metric lines of a run without what depends on the clock."""
    argv = toy.overrides(
        out,
        "--config-name=ppo_megatron_trainer",
        "trainer.backend=ray",
        "trainer.device=cpu",
        "trainer.save_freq=1",
        f"reward.custom_reward_function.path={toy.grader}",
        *more,
    )
    assert main(argv) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(WALL_CLOCK)} for line in lines]


def saved(out: Path, step: int, role: str = "actor") -> dict[str, Tensor]:
    """Every tensor of a role's checkpoint: weights and moments of all ranks."""
    by_name = {}
    for file in sorted((out / f"global_step_{step}" / role).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            by_name |= {f"{file.name}:{name}": tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return by_name


def check_training(toy: Toy, out: Path, more: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of three steps that train, and whose rollouts have the weights of the step before."""
    lines = run(toy, out, *more)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 and line["actor/skipped_steps"] == 0 for line in lines)
    assert all(line["training/rollout_probs_diff_max"] < 1e-6 for line in lines), "the rollouts have other weights"
    return lines


def check_resume(toy: Toy, tmp_path: Path, more: Sequence[str], roles: Sequence[str] = ("actor",)) -> None:
    """Three steps train, and the third one taken up from the second's checkpoint is bitwise the same."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    lines = check_training(toy, whole, more)
    checkpoint = f"trainer.resume_from_path={whole}/global_step_2"
    resumed = run(toy, rest, *more, "trainer.resume_mode=resume_path", checkpoint)
    assert resumed[-1] == lines[-1]
    for role in roles:
        ours, theirs = saved(rest, 3, role), saved(whole, 3, role)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_two_tensor_parallel_ranks_train(toy: Toy, tmp_path: Path, ray_cluster: object) -> None:
    check_training(toy, tmp_path, TP2)


@pytest.mark.slow
def test_two_tensor_parallel_ranks_resume_bitwise(toy: Toy, tmp_path: Path, ray_cluster: object) -> None:
    check_resume(toy, tmp_path, TP2)


@pytest.mark.slow
def test_two_ranks_share_each_sequence(toy: Toy, tmp_path: Path, ray_cluster: object) -> None:
    """Actor, critic and reference do on two ranks what they do on one."""
    more = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", "trainer.total_training_steps=2")
    sizes = (f"{MEGATRON}.context_parallel_size=2", "critic.megatron.context_parallel_size=2")
    alone = run(toy, tmp_path / "alone", *more, "trainer.n_gpus_per_node=1")
    shared = run(toy, tmp_path / "shared", *more, "trainer.n_gpus_per_node=2", *sizes)
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours.keys() == theirs.keys()
        off = {k: (v, theirs[k]) for k, v in ours.items() if v != pytest.approx(theirs[k], rel=1e-4, abs=1e-6)}
        assert off.keys() <= {"rollout/replicas_ready", "weights/bytes"}, off


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_on_two_tensor_parallel_ranks_are_their_own_reference(
    toy: Toy, tmp_path: Path, ray_cluster: object
) -> None:
    model = "actor_rollout_ref.model"
    adapters = (f"{model}.lora_rank=4", f"{model}.lora_alpha=8", f"{model}.target_modules=[q_proj,v_proj,down_proj]")
    more = [
        *TP2,
        *adapters,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=ipc",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "algorithm.adv_estimator=gae",
        "critic.model.lora_rank=4",
        "critic.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    ]
    check_resume(toy, tmp_path, more, roles=("actor", "critic"))
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert abs(lines[0]["actor/kl_loss"]) < 1e-6 < abs(lines[-1]["actor/kl_loss"])
    exported = tmp_path / "whole/global_step_3/actor/huggingface"
    assert (exported / "lora_adapter/adapter_config.json").is_file()
    base, merged = (AutoModelForCausalLM.from_pretrained(str(place)) for place in (toy.model, exported))
    new = dict(merged.named_parameters())
    moved = {name.split(".")[-2] for name, p in base.named_parameters() if not p.equal(new[name])}
    assert moved == {"q_proj", "v_proj", "down_proj"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_stages_of_two_ranks_with_critic_and_reference(toy: Toy, tmp_path: Path, ray_cluster: object) -> None:
    more = [
        "trainer.n_gpus_per_node=4",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        "algorithm.adv_estimator=gae",
        "critic.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    check_resume(toy, tmp_path, more, roles=("actor", "critic"))


def with_experts(toy: Toy, folder: Path) -> Toy:
    """The toy with experts, without a padding token: transformers does not train its embedding, Megatron does."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "bos_token_id": None}
    made = with_model(toy, folder, Qwen3MoeConfig, **sizes, **experts)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    return made


EXPERTS2 = ("trainer.n_gpus_per_node=2", f"{MEGATRON}.expert_model_parallel_size=2")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_on_two_ranks(toy: Toy, tmp_path: Path, ray_cluster: object) -> None:
    check_resume(with_experts(toy, tmp_path / "model"), tmp_path, EXPERTS2)


def logits(run: Path, step: int, folder: Path) -> Tensor:
    """What the merged checkpoint of a step says of some tokens."""
    checkpoint = run / f"global_step_{step}"
    assert model_merger(["merge", "--local_dir", str(checkpoint), "--target_dir", str(folder)]) == 0
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 40)[None]).logits


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_go_from_fsdp_to_megatron_and_back(toy: Toy, tmp_path: Path, ray_cluster: object) -> None:
    """Step 3 of a run on FSDP is also done by Megatron, and step 4 by FSDP from there."""
    experts = with_experts(toy, tmp_path / "model")
    fsdp = ("actor_rollout_ref.actor.strategy=fsdp", "trainer.total_training_steps=4")

    def continued(name: str, checkpoint: Path, *more: str) -> dict[str, Any]:
        at = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
        return run(experts, tmp_path / name, *more, *at)[-1]

    whole = run(experts, tmp_path / "whole", *fsdp)
    there = continued("there", tmp_path / "whole" / "global_step_2", *EXPERTS2)
    back = continued("back", tmp_path / "there" / "global_step_3", *fsdp)
    for ours, theirs, name in ((there, whole[2], "there"), (back, whole[3], "back")):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)
        step = int(theirs["step"])
        got, wanted = (logits(tmp_path / run, step, tmp_path / f"{run}{step}") for run in (name, "whole"))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
        assert (wanted - logits(tmp_path / "whole", step - 1, tmp_path / f"before{step}")).abs().max() > 1e-3
