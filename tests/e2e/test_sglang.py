"""The main job with real SGLang rollouts: every step's weights reach the engine, and answers are of those weights."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.base import EngineContext
from rlsys.rollout.partial import complete
from rlsys.types import ModelRequest, SamplingParams
from tests.contracts.rollout_engine import requests_of, tiny_model
from tests.e2e.conftest import Toy
from tests.sglang_cache import check_retracted, count_read
from trainer.main_ppo import main

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = "actor_rollout_ref.actor.megatron"


def run(toy: Toy, out: Path, *more: str) -> list[dict[str, Any]]:
    argv = toy.overrides(
        out,
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.validate_weight=true",
        f"{ROLLOUT}.validate_save_dir={out}/weights",
        f"reward.custom_reward_function.path={toy.grader}",
        "trainer.device=cpu",
        *more,
    )
    assert main(argv) == 0
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, Any]], reports: Path) -> None:
    """Weights moved at every step and were equal, and the engine's log-probs stayed those of the trainer."""
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert [line["weights/version"] for line in lines] == [1, 2, 3]
    assert all(line["training/rollout_probs_diff_max"] < 1e-5 for line in lines), "the rollouts have other weights"
    for version in range(4):
        report = json.loads((reports / f"weights_v{version}.json").read_text())
        assert report["equal"]
        assert len(report["tensors"]) > 20


def test_fsdp_trains_beside_sglang_in_one_process(toy: Toy, tmp_path: Path) -> None:
    check(run(toy, tmp_path, "trainer.backend=local"), tmp_path / "weights")


@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_two_fsdp_ranks_train_beside_one_sglang_that_they_serve_together(cut: str, toy: Toy, tmp_path: Path) -> None:
    sizes = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.{cut}_model_parallel_size=2", "ray_kwargs.ray_init.num_cpus=2")
    check(run(toy, tmp_path, "trainer.backend=ray", *sizes), tmp_path / "weights")


def test_megatron_tp2_trains_and_sglang_serves_in_processes_of_their_own(toy: Toy, tmp_path: Path) -> None:
    sizes = (
        "trainer.n_gpus_per_node=2",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        "trainer.rollout_workers=1",
        "ray_kwargs.ray_init.num_cpus=3",
    )
    lines = run(toy, tmp_path, "--config-name=ppo_megatron_trainer", "trainer.backend=ray", *sizes)
    check(lines, tmp_path / "weights")


@pytest.mark.parametrize(("wait_s", "updates"), [(60.0, 0), (0.02, 40)])
def test_tokens_of_requests_that_sglang_retracts_are_those_that_it_returns(
    wait_s: float, updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if updates:
        monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")  # one in three steps, right after updates too
    tiny_model().save_pretrained(tmp_path)
    check_retracted(tmp_path, EngineContext(), wait_s=wait_s, updates=updates)


def test_equal_prompts_are_read_once(tmp_path: Path) -> None:
    """Four prompts of some 40 tokens, eight answers each; a batch reads 160 tokens, and the last one of each prompt."""
    from rlsys.rollout.sglang.engine import SGLangRollout

    tiny_model().save_pretrained(tmp_path)
    config = GenerationConfig(seed=11, max_num_seqs=32, max_num_batched_tokens=160, max_model_len=64)
    engine = SGLangRollout(tmp_path, config, EngineContext(), methods=count_read)
    prompts = [request.input_ids for request in requests_of(4, SamplingParams(4), shortest=40)]
    try:
        requests = [ModelRequest(ids, SamplingParams(4, seed=seed)) for ids in prompts for seed in range(8)]
        assert len(complete(engine, requests)) == 32
        total = 8 * sum(map(len, prompts))
        assert engine.remote.call("num_read", deadline_s=30.0) < total / 4
    finally:
        engine.close()
