"""Experts in the whole: trained by either engine, pushed to every rollout engine by the names they are saved by."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.engine_weights import EngineWeights
from rlsys.rollout.hf_files import hf_tensors
from tests.e2e.conftest import Toy, with_model
from tests.ranks import run_ranks
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


@pytest.fixture(scope="module")
def sparse(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The toy with four experts in each layer and heads of 32, the smallest that vLLM's CPU attention has."""
    return with_model(
        toy,
        tmp_path_factory.mktemp("sparse"),
        Qwen3MoeConfig,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
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


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_processes_of_a_copy_hold_whole_experts(engine: str, sparse: Toy, tmp_path: Path) -> None:
    argv = sparse.overrides(
        tmp_path,
        *FSDP,
        *("trainer.n_gpus_per_node=2", f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.gpu_memory_utilization=0.3"),
        *(f"{ROLLOUT}.{size}_parallel_size=2" for size in ("tensor_model", "expert")),
        *(f"{ROLLOUT}.validate_weight=true", f"{ROLLOUT}.parity.freq=1", f"{ROLLOUT}.parity.policy=stop"),
        f"reward.custom_reward_function.path={sparse.grader}",
    )
    assert main(argv) == 0


def learned_from_vllm(path: Path, whole: bool) -> list[tuple[str, tuple[int, ...]]]:
    """The experts' gates that one of two ranks holds, by vLLM's own loader; vLLM's kernel for CPUs cannot run them."""
    import torch.distributed as dist
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    from rlsys.rollout.vllm.engine_args import engine_arguments
    from rlsys.rollout.vllm.groups import own_shared_memory

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    rollout = GenerationConfig(
        enforce_eager=True,
        max_model_len=32,
        dtype="float32",
        tensor_model_parallel_size=2,
        expert_parallel_size=2 if whole else 1,
    )
    config = EngineArgs(
        skip_tokenizer_init=True, **engine_arguments(path, rollout, EngineContext())
    ).create_engine_config()
    with set_current_vllm_config(config):
        with own_shared_memory():
            init_distributed_environment(2, dist.get_rank(), "env://", dist.get_rank(), "gloo")
            initialize_model_parallel(2)
        model = initialize_model(config)
        tensors, aliases = hf_tensors(path, dtype="float32")
        weights = EngineWeights(tensors, aliases, lambda: model, lambda: None)
        learn_engine_layout(weights, keep=False)
    layout = weights.layout(rank=dist.get_rank(), host="")
    assert not layout.loader
    gates = [shard.box for shard in layout.shards if "layers.0.mlp.experts" in shard.box.tensor]
    return sorted((box.tensor, box.shape) for box in gates if "gate_proj" in box.tensor)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_ranks_of_vllm_hold_whole_experts_or_parts_of_all(sparse: Toy) -> None:
    whole, parts = (run_ranks(2, learned_from_vllm, sparse.model, whole) for whole in (True, False))
    gates = [f"model.layers.0.mlp.experts.{expert}.gate_proj.weight" for expert in range(4)]
    assert whole == [[(name, (32, 64)) for name in gates[:2]], [(name, (32, 64)) for name in gates[2:]]]
    assert parts == [[(name, (16, 64)) for name in gates]] * 2


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
