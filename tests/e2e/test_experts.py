"""Experts in the whole: trained by either engine, pushed to every rollout engine by the names they are saved by."""

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.batch import from_responses
from rlsys.rollout.engine_weights import EngineWeights
from rlsys.rollout.hf_files import hf_tensors
from rlsys.rollout.partial import PartialResponse
from rlsys.types import ModelRequest, ResponseDelta, SamplingParams
from rlsys.utils.errors import ConfigError
from tests.contracts.rollout_engine import prompt_batch
from tests.e2e.conftest import GPU_MEMORY, UNCOMPILED, Toy, follow_large_updates, with_model
from tests.ranks import run_ranks
from tests.vllm_experts import divide_experts_on_cpus
from trainer.main_ppo import main
from workers.colocated import learn_engine_layout

ROLLOUT = "actor_rollout_ref.rollout"
FSDP = ("actor_rollout_ref.actor.strategy=fsdp",)
MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
)
ENGINES = [
    pytest.param("hf", marks=pytest.mark.slow),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]),
    pytest.param(
        "sglang", marks=[pytest.mark.sglang, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]
    ),
]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def sparse(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The toy with four experts in each layer and heads of 64, which both engines serve on CPUs and on GPUs."""
    return with_model(
        toy,
        tmp_path_factory.mktemp("sparse"),
        Qwen3MoeConfig,
        **SIZES,
        moe_intermediate_size=32,
        num_experts=4,
        norm_topk_prob=True,
    )


@pytest.fixture(scope="module")
def oss(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The same sizes of gpt-oss, with a window in every other layer."""
    return with_model(
        toy,
        tmp_path_factory.mktemp("oss"),
        GptOssConfig,
        **SIZES,
        num_local_experts=4,
        sliding_window=24,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("training", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
@pytest.mark.parametrize("engine", ENGINES)
def test_experts_are_trained_and_served(engine: str, training: tuple[str, ...], sparse: Toy, tmp_path: Path) -> None:
    argv = sparse.overrides(
        tmp_path,
        *training,
        *("trainer.n_gpus_per_node=2", "trainer.rollout_workers=1", "ray_kwargs.ray_init.num_cpus=4"),
        *(f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.validate_weight=true", "trainer.device=cpu"),
        *([f"{ROLLOUT}.enforce_eager=true"] if engine == "vllm" else []),
        f"reward.custom_reward_function.path={sparse.grader}",
    )
    check(argv, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("training", [FSDP, MEGATRON], ids=["fsdp", "megatron"])
def test_gpt_oss_is_trained_and_served(training: tuple[str, ...], oss: Toy, tmp_path: Path) -> None:
    more = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2", "trainer.device=cpu")
    served = (f"{ROLLOUT}.max_model_len=24", f"{ROLLOUT}.validate_weight=true")
    check(
        oss.overrides(tmp_path, *training, *more, *served, f"reward.custom_reward_function.path={oss.grader}"), tmp_path
    )


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_vllm_on_a_gpu_takes_the_stacks_of_gpt_oss(strategy: str, oss: Toy, tmp_path: Path) -> None:
    argv = oss.overrides(
        tmp_path,
        *(f"actor_rollout_ref.actor.strategy={strategy}", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.validate_weight=true"),
        UNCOMPILED,
        *(f"{ROLLOUT}.parity.freq=1", f"{ROLLOUT}.parity.policy=stop"),
        *GPU_MEMORY["vllm"],
        *("actor_rollout_ref.actor.optim.lr=1e-2", f"reward.custom_reward_function.path={oss.grader}"),
    )
    assert main(argv) == 0


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "size"),
    [("vllm", None), ("sglang", None), ("vllm", "expert"), ("sglang", "tensor"), ("sglang", "expert")],
)
def test_engines_on_a_gpu_follow_large_updates_of_megatron(
    engine: str, size: str | None, sparse: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec(engine) is None or torch.cuda.device_count() < (gpus := 1 + bool(size)):
        pytest.skip(f"needs {engine}, and two GPUs for ranks that divide a model")
    lines = follow_large_updates(
        sparse,
        tmp_path,
        *("actor_rollout_ref.actor.strategy=megatron", f"trainer.n_gpus_per_node={gpus}"),
        *([f"actor_rollout_ref.actor.megatron.{size}_model_parallel_size=2"] if size else []),
        *(f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.enforce_eager=true"),
        *GPU_MEMORY[engine],
        *(f"{ROLLOUT}.validate_weight=true", f"{ROLLOUT}.parity.rows=32", f"{ROLLOUT}.parity.mean_limit=0.05"),
    )
    with capsys.disabled():
        print(
            f"{engine}, {size or 'no'} parallelism: parity/mean_abs",
            *(round(line["parity/mean_abs"], 5) for line in lines),
        )


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dense", ["tensor_model", "data"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_processes_of_a_copy_hold_whole_experts(engine: str, dense: str, sparse: Toy, tmp_path: Path) -> None:
    argv = sparse.overrides(
        tmp_path,
        *FSDP,
        *("trainer.n_gpus_per_node=2", f"{ROLLOUT}.name={engine}"),
        *GPU_MEMORY[engine],
        *(f"{ROLLOUT}.{size}_parallel_size=2" for size in (dense, "expert")),
        *(f"{ROLLOUT}.validate_weight=true", f"{ROLLOUT}.parity.freq=1", f"{ROLLOUT}.parity.policy=stop"),
        f"reward.custom_reward_function.path={sparse.grader}",
    )
    assert main(argv) == 0


def learned_from_vllm(path: Path, tp: int, dp: int, ep: int, stages: int = 1) -> list[tuple[str, tuple[int, ...]]]:
    """The queries and experts' gates that one of two ranks holds, by vLLM's own loader; of stages all tensors."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    from rlsys.rollout.vllm.engine_args import engine_arguments
    from rlsys.rollout.vllm.groups import own_shared_memory
    from rlsys.utils.environment import environment

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    rollout = GenerationConfig(
        enforce_eager=True,
        max_model_len=32,
        dtype="float32",
        tensor_model_parallel_size=tp,
        data_parallel_size=dp,
        expert_parallel_size=ep,
        pipeline_model_parallel_size=stages,
    )
    arguments = EngineArgs(skip_tokenizer_init=True, **engine_arguments(path, rollout, EngineContext()))
    with environment({"RANK": str(dist.get_rank())}):
        config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        with own_shared_memory():
            init_distributed_environment(2, dist.get_rank(), "env://", dist.get_rank(), "gloo")
            initialize_model_parallel(tp, stages)
        model = initialize_model(config)
        tensors, aliases = hf_tensors(path, dtype="float32")
        weights = EngineWeights(tensors, aliases, lambda: model, lambda: None)
        learn_engine_layout(weights, keep=False)
    layout = weights.layout(rank=dist.get_rank(), host="")
    assert not layout.loader
    if stages > 1:
        return sorted((name, tuple(shape)) for name, shape in layout.full_shapes.items())
    boxes = [shard.box for shard in layout.shards if "layers.0." in shard.box.tensor]
    return sorted((box.tensor, box.shape) for box in boxes if "gate_" in box.tensor or "q_proj.w" in box.tensor)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_ranks_of_vllm_hold_whole_experts_or_parts_of_all(sparse: Toy) -> None:
    sizes = ((2, 1, 2), (2, 1, 1), (1, 2, 2))
    whole, parts, copies = (run_ranks(2, learned_from_vllm, sparse.model, *each) for each in sizes)
    gates = [f"model.layers.0.mlp.experts.{expert}.gate_proj.weight" for expert in range(4)]
    half, both = (("model.layers.0.self_attn.q_proj.weight", (rows, 64)) for rows in (64, 128))
    assert whole == [[*((name, (32, 64)) for name in held), half] for held in (gates[:2], gates[2:])]
    assert parts == [[*((name, (16, 64)) for name in gates), half]] * 2
    assert copies == [[*((name, (32, 64)) for name in held), both] for held in (gates[:2], gates[2:])]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize(("ep", "shape", "bias"), [(2, (2, 64, 128), (2, 128)), (1, (4, 64, 64), (4, 64))])
def test_ranks_of_vllm_hold_parts_of_the_stacks_of_gpt_oss(ep: int, shape: Any, bias: Any, oss: Toy) -> None:
    stack, half = "model.layers.0.mlp.experts.gate_up_proj", ("model.layers.0.self_attn.q_proj.weight", (64, 64))
    assert run_ranks(2, learned_from_vllm, oss.model, 2, 1, ep) == [[(stack, shape), (f"{stack}_bias", bias), half]] * 2


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_that_would_load_gpt_oss_again_on_a_cpu_is_refused(oss: Toy) -> None:
    from rlsys.rollout.vllm.engine_args import engine_arguments

    with pytest.raises(ConfigError, match=r"the experts of gpt_oss once only: set rollout.name=hf"):
        engine_arguments(oss.model, GenerationConfig(), EngineContext(load_format="dummy"))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_stages_of_vllm_hold_the_tensors_of_their_layers(sparse: Toy) -> None:
    first, last = run_ranks(2, learned_from_vllm, sparse.model, 1, 1, 1, 2)
    whole = {name: tuple(tensor.shape) for name, tensor in load_file(sparse.model / "model.safetensors").items()}
    assert dict(first) == {name: shape for name, shape in whole.items() if not name.startswith("model.layers.1.")}
    assert dict(last) == {name: shape for name, shape in whole.items() if not name.startswith("model.layers.0.")}


def served_together(folders: list[Path], tp: int, stages: int) -> list[float]:
    """How far log-probs are from transformers', on a rank of two copies of the attention that share four experts."""
    from rlsys.rollout.vllm.engine import VLLMRollout

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid()), "LOCAL_RANK": "0"}
    divide_experts_on_cpus()
    sizes = {"tensor_model_parallel_size": tp, "data_parallel_size": 2, "expert_parallel_size": 2 * tp}
    sizes["pipeline_model_parallel_size"] = stages
    rollout = GenerationConfig(enforce_eager=True, max_model_len=64, dtype="float32", max_num_seqs=8, **sizes)
    engine, differences = VLLMRollout(folders[0], rollout, EngineContext()), []
    group, _ = dist.new_subgroups(2 * tp * stages)

    def exchanged(new: Sequence[ModelRequest] = ()) -> list[ResponseDelta]:
        """What the ranks that answer for their copies return."""
        returned: list[list[ResponseDelta]] = [[]] * 2 * tp * stages
        dist.all_gather_object(returned, engine.exchange(new, wait_s=0.05), group)
        return [delta for deltas in returned[:: tp * stages] for delta in deltas]

    def update(version: int) -> None:
        engine.begin_update()
        engine.load([*load_file(folders[version] / "model.safetensors").items()])
        engine.finish_update(version)

    for version, folder in enumerate(folders):
        if version:
            update(version)
        reference = AutoModelForCausalLM.from_pretrained(folder)
        for number in (1, 5):  # with one request the other copy has none
            lengths = range(3, 3 + 4 * number, 4)
            requests = [ModelRequest(tuple(range(5, 5 + n)), SamplingParams(n, ignore_eos=True)) for n in lengths]
            rids = [f"{version} {number} {n}" for n in lengths]
            partial = {rid: PartialResponse(one) for rid, one in zip(rids, requests, strict=True)}
            new = [one.rest(rid) for rid, one in partial.items()]
            while any(one.finish is None for one in partial.values()):
                for delta in exchanged(new):
                    assert not delta.error
                    partial[delta.rid].add(delta)
                new = []
            for one in partial.values():
                ids = torch.tensor([*one.request.input_ids, *one.tokens])
                logits = reference(ids[None]).logits[0, len(one.request.input_ids) - 1 : -1]
                expected = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
                differences.append((expected - torch.tensor(one.logprobs)).abs().max().item())
            rows = from_responses(prompt_batch(requests), [one.response() for one in partial.values()])
            scores = engine.compute_log_prob(rows)
            differences.append((scores - rows.batch["rollout_log_probs"]).abs().max().item())
    long = ModelRequest((5, 6, 7), SamplingParams(60, ignore_eos=True), "long")
    deltas = exchanged([long])
    update(0)
    while not any(delta.finish for delta in deltas):
        deltas += exchanged()
    assert sum(len(delta.tokens) for delta in deltas) == 60
    engine.close()
    return differences


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize(
    ("num_ranks", "tp", "stages"),
    [(2, 1, 1), (4, 2, 1), (4, 1, 1), (4, 1, 2)],
    ids=["one copy", "tensor parallel", "two copies", "in stages"],
)
def test_copies_of_the_attention_share_experts(
    num_ranks: int, tp: int, stages: int, sparse: Toy, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(sparse.model)
    for seed in range(3):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / str(seed))
    for differences in run_ranks(num_ranks, served_together, [tmp_path / str(seed) for seed in range(3)], tp, stages):
        assert max(differences) < 1e-5


def test_fsdp_trains_experts_beside_their_rollout(sparse: Toy, tmp_path: Path) -> None:
    more = ("trainer.backend=local", f"reward.custom_reward_function.path={sparse.grader}")
    check(sparse.overrides(tmp_path, *more, f"{ROLLOUT}.validate_weight=true"), tmp_path)


def check(argv: list[str], out: Path) -> None:
    """Weights moved at every step, and the engine's log-probs stayed those of the trainer."""
    assert main(argv) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert max(line["training/rollout_probs_diff_max"] for line in lines) < 1e-5
