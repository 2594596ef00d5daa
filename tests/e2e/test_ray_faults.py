"""Workers that die or stop under real Ray: one error and a run that can be taken up, or a replica that is replaced."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from rlsys.utils.run_folders import LATEST
from tests.e2e.conftest import Toy
from tests.timing import scaled_s

STEPS = 8
STARTED_S, ENDED_S, WHOLE_S = 150.0, 60.0, 240.0
MODEL = f"global_step_{STEPS}/actor/model_world_size_1_rank_0.safetensors"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class RayRun:
    """The main job in a process of its own, with an actor and two rollout workers in a cluster that it starts."""

    def __init__(self, toy: Toy, out: Path, *more: str) -> None:
        limits = [
            f"trainer.deadlines.{name}_s={scaled_s(15):g}" for name in ("call", "generate", "update", "weights", "save")
        ]
        argv = toy.overrides(
            out,
            "trainer.save_freq=1",
            f"trainer.total_training_steps={STEPS}",
            "trainer.rollout_workers=2",
            "ray_kwargs.ray_init.num_cpus=4",
            f"reward.custom_reward_function.path={toy.grader}",
            *limits,
            *more,
        )
        self.metrics = out / "metrics.jsonl"
        self._log = out.parent / f"{out.name}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.main_ppo", *argv],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._family: list[psutil.Process] = []

    def lines(self) -> list[dict[str, Any]]:
        text = self.metrics.read_text() if self.metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def signal_worker(self, title: str, number: int, *, after_step: int) -> None:
        """Send a signal to the first Ray worker of that title once a step is done."""
        self._wait_for(after_step)
        worker = next(one for one in self._family if " ".join(one.cmdline()).startswith(f"ray::{title}"))
        worker.send_signal(number)

    def signal_driver(self, number: int, *, after_step: int, and_family: bool = False) -> None:
        """Send a signal to the driver, whose cluster must follow it, or as `timeout` and SLURM do to all processes."""
        self._wait_for(after_step)
        self.process.send_signal(number)
        for one in self._family if and_family else ():
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def _wait_for(self, after_step: int) -> None:
        end_s = time.monotonic() + scaled_s(STARTED_S)
        while not any(line["step"] >= after_step for line in self.lines()):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end_s, self.log
            time.sleep(0.02)
        self._family = psutil.Process(self.process.pid).children(recursive=True)

    def end(self, within_s: float) -> int:
        """The exit code; nothing of the run may live a little later."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            pytest.fail(f"still running after {within_s:g} s:\n{self.log}")
        _, living = psutil.wait_procs(self._family, timeout=scaled_s(15))
        assert not living, f"left behind: {[one.cmdline() for one in living]}"
        return code

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def error(self) -> str:
        """The one error that was printed."""
        errors = [line for line in self.log.splitlines() if line.startswith("rlsys: ") and "Error" in line]
        assert len(errors) == 1, self.log
        return errors[0]


def test_a_lost_actor_ends_the_run_and_the_command_continues_even_after_a_lost_rollout_worker(
    toy: Toy, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert RayRun(toy, whole).end(WHOLE_S) == 0

    killed = RayRun(toy, out)
    killed.signal_worker("Colocated_actor", signal.SIGKILL, after_step=2)
    assert killed.end(ENDED_S) == 1
    assert "WorkerError: actor rank 0 on" in killed.error()
    assert "failed at stage '" in killed.error()
    assert "\n  reward      " in killed.log
    saved = (out / LATEST).read_text().strip()  # the last step that had reached the disk
    assert saved in ("1", "2")
    assert f"\n  next        the same command continues from step {saved}\n" in killed.log

    stopped = RayRun(toy, out)
    stopped.signal_worker("Colocated_actor", signal.SIGSTOP, after_step=3)
    assert stopped.end(ENDED_S) == 1
    assert "DeadlineError: actor rank 0 on" in stopped.error()
    assert "at stage '" in stopped.error()
    assert "stopped by a signal" in stopped.log

    orphaned = RayRun(toy, out)
    orphaned.signal_driver(signal.SIGKILL, after_step=4)
    assert orphaned.end(ENDED_S) == -signal.SIGKILL

    replaced = RayRun(toy, out)
    replaced.signal_worker("Colocated_rollout", signal.SIGKILL, after_step=6)
    assert replaced.end(WHOLE_S) == 0, replaced.log
    assert [line["step"] for line in replaced.lines()] == list(range(1, STEPS + 1))
    assert all(line["training/staleness"] == 0 for line in replaced.lines())
    ours, theirs = load_file(str(out / MODEL)), load_file(str(whole / MODEL))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize("and_family", [False, True])
def test_a_driver_that_gets_sigterm_shuts_down_cleanly(toy: Toy, tmp_path: Path, and_family: bool) -> None:
    run = RayRun(toy, tmp_path / "out")
    run.signal_driver(signal.SIGTERM, after_step=1, and_family=and_family)
    assert run.end(ENDED_S) == 128 + signal.SIGTERM, run.log
    assert "rlsys: stopped by SIGTERM" in run.log
    assert run.log.rstrip().splitlines()[-1].startswith("  next        the same command continues ")


@pytest.mark.parametrize("later_s", [0.5, 1.5, 2.5, 3.5, 4.5])
def test_sigterm_while_ray_starts_ends_the_run_in_order(toy: Toy, tmp_path: Path, later_s: float) -> None:
    run = RayRun(toy, tmp_path / "out")
    end_s = time.monotonic() + scaled_s(STARTED_S)
    while "starting Ray" not in run.log:
        assert run.process.poll() is None, run.log
        assert time.monotonic() < end_s, run.log
        time.sleep(0.02)
    time.sleep(later_s)
    run.process.send_signal(signal.SIGTERM)
    assert run.end(ENDED_S) == 128 + signal.SIGTERM, run.log
    assert "rlsys: stopped by SIGTERM" in run.log


def test_a_cluster_that_is_too_small_is_reported(toy: Toy, tmp_path: Path) -> None:
    small = RayRun(toy, tmp_path / "out", "trainer.rollout_workers=7")
    assert small.end(ENDED_S + STARTED_S) == 2, small.log
    assert "ConfigError" in small.error()
    assert "Traceback" not in small.log
