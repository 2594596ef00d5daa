"""The main job, whole, in this process: what it leaves behind and that it can be taken up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import Toy
from trainer.main_ppo import main

LOCAL = "trainer.backend=local"
WALL_CLOCK = ("timing", "perf/", "weights/seconds", "reward/seconds")


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """The metric lines without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(WALL_CLOCK)} for line in lines]


def weights_of(out: Path, step: int) -> dict[str, Any]:
    return load_file(str(out / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.safetensors"))


def test_a_run_leaves_metrics_checkpoint_timeline_and_rollouts(toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "out"
    rollouts = f"trainer.rollout_data_dir={out}/rollouts"
    assert main(toy.overrides(out, LOCAL, rollouts, "trainer.test_freq=2")) == 0
    lines = metrics_of(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"} <= set(lines[0])
    assert any(name.startswith("val-core/rlsys/arithmetic/") for name in lines[1])
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (out / "rollouts" / "index.html").exists()
    assert len((out / "rollouts" / "1.jsonl").read_text().splitlines()) == 32
    names = {event["name"] for event in json.loads((out / "timeline.json").read_text())}
    assert {"gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights"} <= names


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(toy: Toy, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(toy.overrides(whole, LOCAL, "trainer.save_freq=1")) == 0
    assert main(toy.overrides(parts, LOCAL, "trainer.save_freq=1", "trainer.total_training_steps=2")) == 0
    assert main(toy.overrides(parts, LOCAL, "trainer.save_freq=1")) == 0
    ours, theirs = weights_of(parts, 3), weights_of(whole, 3)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert metrics_of(parts) == metrics_of(whole)


def test_a_run_that_is_done_says_so_and_changes_nothing(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = toy.overrides(out, LOCAL, "trainer.total_training_steps=1")
    assert main(argv) == 0
    assert "rlsys: done in" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "nothing is left to do" in told
    assert f"{out}/metrics.jsonl" in told
    assert "done in" not in told
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert main([*argv, "trainer.total_training_steps=2"]) == 0
    assert [line["step"] for line in metrics_of(out)] == [1, 2]


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"),
        ("algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
        ("algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token"),
        ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true"),
    ],
    ids=["ppo with critic and reference", "remax with adaptive kl", "bypass with importance weights", "lora"],
)
def test_other_algorithms_run_through_the_same_loop(toy: Toy, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    assert main(toy.overrides(out, LOCAL, "trainer.total_training_steps=1", *overrides)) == 0
    (line,) = metrics_of(out)
    assert line["actor/skipped_steps"] == 0
