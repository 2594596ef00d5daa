"""Experts in the whole: trained by either engine, pushed to every rollout engine by the names they are saved by."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from tests.e2e.conftest import Toy, with_model
from trainer.main_ppo import main

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
