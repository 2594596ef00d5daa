"""kill -9 and SIGSTOP of every kind of process at every stage, under Ray.

A run that loses the actor, critic, reference or reward model ends with one error that names role, rank, host and stage;
a rollout worker is replaced and the run continues, unless weights are being pushed to it. Either way nothing is left
and what the same command makes of it in the end is bitwise what an uninterrupted run makes. All runs share a head and a
process that has imported everything.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy, enlarge
from tests.e2e.fault_injection import HEAD_PID, Fault
from tests.e2e.fork_server import Ended, ForkServer, Patches
from tests.e2e.ray_head import Head
from tests.e2e.test_resume_after_kill import assert_same, metrics_of
from tests.timing import scaled_s

ENDED_S = 60.0
ERROR = re.compile(r"rlsys: (WorkerError|DeadlineError): (\w+) ranks? (\d)(?:, \d)* on [\w.-]+ .*stage '(\w+)'")
INJECTED = re.compile(r"injected: ([\d.]+) ")
STEPS = 3
START = ("actor.init_model", "connect", "update_weights")
STEP = ("gen", "reward", "old_log_prob", "ref", "reward_model", "values", "adv", "update_critic", "update_actor")
END = ("dump_rollouts", "testing", "save_checkpoint")
TRAIN_CALLS = (
    "critic.init_model",
    "ref.init_model",
    "actor.open_weight_transfer",
    "actor.send_weights",
    "actor.compute_log_prob",
    "ref.compute_ref_log_prob",
    "critic.compute_values",
    "critic.update_critic",
    "actor.update_actor",
    "actor.save_checkpoint",
    "critic.save_checkpoint",
)

LOADS = ("load_checkpoint", "actor.load_checkpoint", "critic.load_checkpoint")


@dataclass(frozen=True)
class Runs:
    """PPO with critic, reference, adaptive KL and a reward model; this and the rollout have own processes."""

    server: ForkServer
    head: Head
    toy: Toy
    folder: Path
    ended_s: list[float] = field(default_factory=list)

    def run(self, out: Path, *faults: Fault, more: Sequence[str] = ()) -> Ended:
        """Wait until the run succeeds or fails; nothing of it may be left."""
        before = shared_memory()
        names = ("call", "generate", "update", "weights", "save", "reward")
        argv = self.toy.overrides(
            out,
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive",
            "reward.reward_model.enable=true",
            f"reward.reward_model.model_path={self.toy.judge}",
            "reward.reward_model.enable_resource_pool=true",
            "reward.reward_model.nnodes=1",
            f"reward.custom_reward_function.path={self.toy.grader}",
            "trainer.rollout_workers=1",
            "trainer.test_freq=1",
            "trainer.save_freq=1",
            f"trainer.total_training_steps={STEPS}",
            f"trainer.rollout_data_dir={out}/rollouts",
            f"trainer.deadlines.start_s={scaled_s(45):g}",
            "actor_rollout_ref.rollout.parity.freq=-1",
            *(f"trainer.deadlines.{name}_s={scaled_s(8):g}" for name in names),
            *more,
        )
        env = {**self.head.env, HEAD_PID: str(self.head.process.pid)}
        ended = self.server.run(argv, out.with_suffix(".log"), Patches(faults=faults), env=env, deadline_s=300)
        self.ended_s.append(time.monotonic())
        assert ended.orphans == 0
        assert ended.log.count("injected: ") == len(faults), ended.log
        self.assert_left_clean(before)
        return ended

    def whole(self, *more: str) -> Path:
        """An uninterrupted run: in one process, where that can be."""
        out = self.folder / "-".join(["whole", *more])
        if not out.exists():
            here = () if more else ("trainer.backend=local", "trainer.rollout_workers=0")
            ended = self.run(out, more=[*more, *here])
            assert ended.status == 0, ended.log
        return out

    def fails(self, out: Path, fault: Fault, *more: str) -> None:
        """The run ends with one error about this fault, in time."""
        ended = self.run(out, fault, more=more)
        assert ended.status == 1, f"{fault}\n{ended.log}"
        took_s = self.ended_s[-1] - float(INJECTED.findall(ended.log)[0])
        assert took_s < ENDED_S, f"{fault}: {took_s:.0f} s\n{ended.log}"
        errors = [line for line in ended.log.splitlines() if line.startswith("rlsys: ") and "preset" not in line]
        assert len(errors) == 1, ended.log
        assert "Traceback" not in ended.log, ended.log
        message = ERROR.match(errors[0])
        assert message, errors[0]
        kind, role, rank, _ = message.groups()
        assert kind == ("DeadlineError" if fault.signal == "STOP" else "WorkerError"), f"{fault}: {errors[0]}"
        assert role in ({"actor", "critic", "ref"} if fault.role == "actor" else {fault.role}), errors[0]
        assert int(rank) <= fault.rank, errors[0]
        if fault.signal == "STOP" and fault.rank:
            assert re.search(r"^  rank \d: .*stopped by a signal", ended.log, re.MULTILINE), ended.log

    def all_fail(self, out: Path, faults: Sequence[Fault], *more: str) -> None:
        """Each of these, one run after the other; failures are reported together."""
        wrong = []
        for fault in faults:
            try:
                self.fails(out, fault, *more)
            except AssertionError as error:
                wrong.append(f"{fault}: {error}")
        assert not wrong, "\n\n".join(wrong)

    def finishes(self, out: Path, *faults: Fault, more: Sequence[str] = ()) -> None:
        """The run recovers from all faults, and leaves what an uninterrupted one does."""
        ended = self.run(out, *faults, more=more)
        assert ended.status == 0, f"{faults}\n{ended.log}"
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert max(line["timing_s/step"] for line in lines) < ENDED_S, ended.log
        ignored = ("rollout/failures", "rollout/retries", "rollout/restarts")
        assert_same(out, self.whole(*more), ignored=ignored, last=len(lines))

    def assert_left_clean(self, before: set[str]) -> None:
        """No actor, reservation, process (so no port) and no shared memory of a run."""
        end_s = time.monotonic() + scaled_s(15.0)
        while left := [*self.head.living(), *self.head.processes(), *shared_memory() - before]:
            assert time.monotonic() < end_s, left
            time.sleep(0.2)


def shared_memory() -> set[str]:
    """Named memory that Ray, torch or this package may have made; others on this host have theirs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("rlsys", "plasma", "ray", "torch"))}


@pytest.fixture(scope="module")
def runs(head: Head, server: ForkServer, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(server, head, toy, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def out(runs: Runs, tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_lost_rollout_is_replaced(runs: Runs, out: Path) -> None:
    runs.finishes(out, Fault("rollout", "rollout.exchange"))


@pytest.mark.slow
def test_a_rollout_lost_in_a_parity_probe_is_replaced(runs: Runs, out: Path) -> None:
    parity = "actor_rollout_ref.rollout.parity"
    more = [f"{parity}.freq=2", f"{parity}.rows=3", "trainer.n_gpus_per_node=2"]
    ended = runs.run(out, Fault("rollout", "rollout.compute_log_prob"), more=more)
    assert ended.status == 0, ended.log
    assert "parity probe: rollout cannot score given tokens" in ended.log
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("parity/skipped") for line in lines if line["step"] > 0] == [1.0, 0.0, None]
    assert lines[1]["parity/max_abs"] < 1e-4


signals = pytest.mark.parametrize("signal", ["KILL", "STOP"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@signals
@pytest.mark.parametrize("points", [(*START, *STEP, *END), (*TRAIN_CALLS, *LOADS)], ids=["idle or not", "in a call"])
def test_the_training_worker(runs: Runs, out: Path, signal: str, points: tuple[str, ...]) -> None:
    first, loads = [[point for point in points if (point in LOADS) == late] for late in (False, True)]
    saved = [Fault("actor", "critic.update_critic", signal, entry=2)]
    faults = [*(Fault("actor", point, signal) for point in first), *saved]
    runs.all_fail(out, [*faults, *(Fault("actor", point, signal) for point in loads)])
    runs.finishes(out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@signals
def test_the_reward_model(runs: Runs, out: Path, signal: str) -> None:
    points = ("rm.init_model", *START[1:], *STEP, *END, "rm.compute_rm_score")
    # lost after its part of a step it is missed in the next one
    longer = f"trainer.total_training_steps={STEPS + len(points)}"
    runs.all_fail(out, [Fault("rm", point, signal) for point in points], longer)
    runs.finishes(out, more=[longer])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@signals
def test_a_rollout_worker(runs: Runs, out: Path, signal: str) -> None:
    start = ("rollout.init_model", "connect", "rollout.open_weight_transfer", "update_weights")
    pushed = Fault("rollout", "rollout.receive_weights", signal, entry=2)
    runs.all_fail(out, [*(Fault("rollout", point, signal) for point in start), pushed])
    shutil.rmtree(out)
    points = [*STEP, *END, "rollout.exchange"]
    for first in range(0, len(points), STEPS):
        faults = [Fault("rollout", at, signal, step) for step, at in enumerate(points[first : first + STEPS], 1)]
        runs.finishes(out, *faults)
        shutil.rmtree(out)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_driver(runs: Runs, out: Path) -> None:
    first = [*START, *STEP, *END, "critic.update_critic", "rollout.exchange"]
    faults = [*(Fault("driver", point) for point in first), Fault("driver", "update_actor", entry=2)]
    for fault in [*faults, *(Fault("driver", point) for point in LOADS)]:
        assert runs.run(out, fault).status == -9
    runs.finishes(out)
    shutil.rmtree(out)
    runs.finishes(out, *(Fault("driver", point, "STOP") for point in ("connect", "gen", "update_actor", "testing")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@signals
def test_one_of_two_training_ranks(runs: Runs, out: Path, signal: str) -> None:
    two = "trainer.n_gpus_per_node=2"
    points = ("actor.init_model", "actor.compute_log_prob", "critic.update_critic", "actor.update_actor")
    runs.all_fail(out, [Fault("actor", point, signal, rank=1) for point in points], two)
    runs.finishes(out, more=[two])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk(runs: Runs, small_disk: Path) -> None:
    out = small_disk / "out"
    ended = runs.run(out)
    assert ended.status == 1
    assert "No space left on device" in ended.log
    assert ended.log.count("rlsys: CheckpointError") + ended.log.count("rlsys: WorkerError") == 1, ended.log
    assert not list(out.glob("global_step_*.tmp"))
    enlarge(small_disk)
    assert runs.run(out).status == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_step_off_with_decoupled_ppo(runs: Runs, out: Path) -> None:
    off = ("trainer.max_staleness=1", "trainer.reproducible=true", "algorithm.rollout_correction.rollout_is=token")
    for point in ("source", "update_actor", "actor.send_weights", "save_checkpoint", "critic.save_checkpoint"):
        assert runs.run(out, Fault("driver", point), more=off).status == -9
    train = [Fault("actor", point) for point in ("actor.update_actor", "save_checkpoint")]
    runs.all_fail(out, [*train, Fault("actor", "critic.update_critic", "STOP")], *off)
    runs.finishes(out, Fault("rollout", "rollout.exchange"), more=off)
    last = metrics_of(out)[-1]
    assert last["training/staleness_max"] == 1
    assert last["rollout_corr/rollout_is_std"] > 0
