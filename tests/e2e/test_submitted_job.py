"""`ray job submit` of the main job to a head that was there before and stays."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy
from tests.e2e.ray_head import RAY, ROOT, Head
from tests.timing import scaled_s

DEADLINE_S = 120.0


def submit(head: Head, argv: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """As the README has it, from the checkout."""
    return ray_job(
        head, "submit", "--working-dir", ".", *options, "--", sys.executable, "-m", "trainer.main_ppo", *argv
    )


def ray_job(head: Head, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RAY, "job", *argv], env=head.env, cwd=ROOT, capture_output=True, text=True, timeout=scaled_s(DEADLINE_S)
    )


def steps_of(out: Path) -> list[int]:
    metrics = out / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def assert_left_clean(head: Head) -> None:
    """No actor, reservation or process of a job remains; the head takes another one."""
    end_s = time.monotonic() + scaled_s(10.0)
    while (left := [*head.living(), *head.processes()]) and time.monotonic() < end_s:
        time.sleep(0.2)
    assert not left
    assert head.jobs_are_taken()


def test_a_submitted_job_trains_and_leaves_the_cluster_clean(head: Head, toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = submit(head, toy.overrides(out, f"reward.custom_reward_function.path={toy.grader}"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rlsys: done in" in done.stdout
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert (out / "global_step_3" / "trainer.json").exists()
    assert_left_clean(head)


@pytest.mark.slow
def test_a_stopped_job_leaves_a_clean_cluster_and_the_next_one_continues(head: Head, toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = toy.overrides(out, "trainer.save_freq=1", "trainer.total_training_steps=60")
    assert submit(head, argv, "--no-wait", "--submission-id=stopped").returncode == 0
    end_s = time.monotonic() + scaled_s(DEADLINE_S)
    while len(steps_of(out)) < 2:
        assert time.monotonic() < end_s, ray_job(head, "logs", "stopped").stdout
        time.sleep(0.1)
    stopped = ray_job(head, "stop", "stopped")
    assert "was stopped" in stopped.stdout, stopped.stdout + stopped.stderr
    assert_left_clean(head)
    seen = len(steps_of(out))
    last = seen + 2
    again = submit(head, [*argv, f"trainer.total_training_steps={last}"])
    assert again.returncode == 0, again.stdout
    assert steps_of(out) == list(range(1, last + 1))
    assert_left_clean(head)


@pytest.mark.slow
def test_a_wrong_setting_fails_the_submitted_job_with_its_message(head: Head, toy: Toy, tmp_path: Path) -> None:
    failed = submit(head, toy.overrides(tmp_path / "out", "trainer.total_training_stpes=1"))
    assert failed.returncode == 1
    assert "trainer.total_training_stpes" in failed.stdout
    assert "total_training_steps" in failed.stdout
    assert "Traceback" not in failed.stdout
    assert_left_clean(head)
