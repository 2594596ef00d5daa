"""Router replay in whole runs: routes of the log-probs (R2) or of the rollout (R3) are those of the update."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from rlsys.config import load_config
from rlsys.utils.errors import ConfigError
from tests.e2e.conftest import GPU_MEMORY, Toy, with_model
from trainer.main_ppo import main

ACTOR = "actor_rollout_ref.actor"
MEGATRON, REPLAY = f"{ACTOR}.megatron", f"{ACTOR}.router_replay.mode"
LOCAL = ("trainer.backend=local", "trainer.device=cpu")
RETURNED = "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"


@pytest.fixture(scope="module")
def sparse(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return with_model(
        toy,
        tmp_path_factory.mktemp("sparse"),
        Qwen3MoeConfig,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.3,
    )


@pytest.fixture(scope="module")
def served(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A model with the sizes that the kernels of vLLM and SGLang have, whose routes matter in bfloat16.

    Its tokens go to 2 of 64 experts, chosen among many of nearly the same score. On a CPU its log-probs in bfloat16
    have a K3 of 0.03 to those in float32, and of 0.0004 where they take the routes of those.
    """
    return with_model(
        toy,
        tmp_path_factory.mktemp("served"),
        Qwen3MoeConfig,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.1,
    )


def run(toy: Toy, out: Path, *more: str) -> list[dict[str, Any]]:
    argv = toy.overrides(
        out,
        *("--config-name=ppo_megatron_trainer", "trainer.total_training_steps=2"),
        *(f"reward.custom_reward_function.path={toy.grader}", "algorithm.rollout_correction.rollout_is=token", *more),
    )
    assert main(argv) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def least_likely(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A router of an engine that rounds very differently: it takes the least likely experts."""
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores, taken = logits.softmax(-1).topk(self.top_k, largest=False)
    return logits, scores / scores.sum(-1, keepdim=True), taken


AHEAD = ("trainer.max_staleness=2", f"{ACTOR}.optim.lr=0")
"""Answers of several versions, which are equal so that K3 is that of the routes."""


@pytest.mark.parametrize("more", [(), AHEAD, (*AHEAD, "trainer.reproducible=true")], ids=["sync", "async", "repeated"])
def test_the_update_replays_routes_of_the_rollout(
    sparse: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", least_likely)
    alone = run(sparse, tmp_path / "alone", *LOCAL, *more)
    replayed = run(sparse, tmp_path / "replayed", *LOCAL, *more, f"{REPLAY}=R3", RETURNED)
    assert all(line["rollout_corr/k3_kl"] > 0.01 for line in alone)
    assert all(abs(line["rollout_corr/k3_kl"]) < 1e-6 for line in replayed)
    assert all(line["training/rollout_probs_diff_max"] < 1e-5 for line in replayed)
    assert all(line["actor/routes_differ"] > 0.8 and line["actor/grad_norm"] > 0 for line in replayed)


def k3_by_replay(modes: tuple[str, ...], toy: Toy, out: Path, *more: str) -> dict[str, float]:
    """K3 between engine and trainer over two steps, by mode of replay.

    Nothing is learned: each mini-batch is routed by the weights that generated it.
    """
    k3 = {}
    for mode in modes:
        replay = {"none": (), "R2": (f"{REPLAY}=R2",), "R3": (f"{REPLAY}=R3", RETURNED)}[mode]
        lines = run(toy, out / mode, f"{ACTOR}.optim.lr=0", "data.max_response_length=16", *replay, *more)
        assert all(line["actor/grad_norm"] > 0 for line in lines)
        assert max(line.get("actor/routes_differ", 0.0) for line in lines) < 0.1, "more than rounding"
        k3[mode] = sum(line["rollout_corr/k3_kl"] for line in lines) / len(lines)
    return k3


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "modes", "copies"),
    [
        ("vllm", ("none", "R2", "R3"), 1),
        ("sglang", ("none", "R3"), 1),
        ("vllm", ("none", "R3"), 2),
        ("sglang", ("none", "R3"), 2),
    ],
    ids=["vllm", "sglang", "vllm-copies", "sglang-copies"],
)
def test_routes_of_engines_on_a_gpu_bring_log_probs_nearer(
    engine: str, modes: tuple[str, ...], copies: int, served: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R3, that is: R2 replays routes of the trainer's own log-probs, which are as far from the engine as without."""
    if find_spec(engine) is None or torch.cuda.device_count() < copies:
        pytest.skip(f"needs {engine} and {copies} GPUs")
    rollout = "actor_rollout_ref.rollout"
    settings = (
        f"{rollout}.name={engine}",
        f"{rollout}.enforce_eager=true",
        *GPU_MEMORY[engine],
        *(f"trainer.n_gpus_per_node={copies}", f"{rollout}.data_parallel_size={copies}"),
        f"{rollout}.expert_parallel_size={copies}",
    )
    k3 = k3_by_replay(modes, served, tmp_path, *settings)
    with capsys.disabled():
        print(f"{engine} x {copies}: K3 by replay", {mode: f"{value:.2e}" for mode, value in k3.items()})
    assert k3["R3"] <= 0.5 * min(value for mode, value in k3.items() if mode != "R3")


@pytest.mark.slow
def test_two_stages_replay_their_own_routes_in_the_second_epoch(sparse: Toy, tmp_path: Path) -> None:
    stages = (
        "trainer.backend=ray",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
    )
    first, second = run(sparse, tmp_path, *stages, f"{MEGATRON}.router_replay.mode=R2", f"{ACTOR}.ppo_epochs=2")
    assert first["training/rollout_probs_diff_max"] < 1e-5
    assert 0 < first["actor/routes_differ"] < 0.5
    assert 0 < second["actor/routes_differ"] < 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((f"{REPLAY}=R3",), "enable_rollout_routing_replay"),
        ((RETURNED,), "enable_rollout_routing_replay"),
        ((f"{REPLAY}=R2", "algorithm.rollout_correction.bypass_mode=true"), "in bypass mode nothing computes"),
        ((f"{REPLAY}=R3", RETURNED, "actor_rollout_ref.rollout.multi_turn.enable=true"), "return no routes"),
        ((f"{REPLAY}=R2", f"{ACTOR}.strategy=fsdp"), "router_replay"),
    ],
)
def test_what_cannot_be_replayed_is_refused(settings: tuple[str, ...], says: str, sparse: Toy, tmp_path: Path) -> None:
    argv = sparse.overrides(tmp_path, "--config-name=ppo_megatron_trainer", "trainer.device=cpu", *settings)
    with pytest.raises(ConfigError, match=says):
        load_config(argv)
