"""The main job with real vLLM rollouts: weights reach the engine after every step, and answers are of those weights."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from tests.e2e.conftest import Toy
from trainer.main_ppo import main

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = "actor_rollout_ref.actor.megatron"


@pytest.fixture(scope="module")
def wide(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The toy with heads of 32, the smallest that vLLM's CPU attention has."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(toy.model)
    tokenizer.save_pretrained(str(folder))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return replace(toy, model=folder)


def run(toy: Toy, out: Path, *more: str) -> list[dict[str, Any]]:
    argv = toy.overrides(
        out,
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.validate_weight=true",
        f"reward.custom_reward_function.path={toy.grader}",
        "trainer.device=cpu",
        *more,
    )
    assert main(argv) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, Any]]) -> None:
    """Weights moved at every step, and the engine's log-probs stayed those of the trainer."""
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert [line["weights/version"] for line in lines] == [1, 2, 3]
    assert all(line["training/rollout_probs_diff_max"] < 1e-5 for line in lines), "the rollouts have other weights"


def test_fsdp_trains_beside_vllm_in_one_process_and_again_after_that(wide: Toy, tmp_path: Path) -> None:
    for number in range(2):
        check(run(wide, tmp_path / str(number), "trainer.backend=local"))


def test_two_fsdp_ranks_train_beside_one_vllm_that_they_serve_together(wide: Toy, tmp_path: Path) -> None:
    sizes = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2", "ray_kwargs.ray_init.num_cpus=2")
    check(run(wide, tmp_path, "trainer.backend=ray", *sizes))


def test_megatron_tp2_trains_and_vllm_serves_in_processes_of_their_own(wide: Toy, tmp_path: Path) -> None:
    sizes = (
        "trainer.n_gpus_per_node=2",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        "trainer.rollout_workers=1",
        "ray_kwargs.ray_init.num_cpus=3",
    )
    check(run(wide, tmp_path, "--config-name=ppo_megatron_trainer", "trainer.backend=ray", *sizes))
