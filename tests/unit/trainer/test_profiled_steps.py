"""Which processes are profiled in which steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.config.schema.trainer import ProfilerConfig
from rlsys.telemetry.trackers import BestEffort
from trainer.loop import CheckpointedLoop
from workers.base import EngineWorker, ProfiledWorker
from workers.rollout import RolloutWorker


class Group:
    """A worker group that keeps what is called; a dead one fails."""

    def __init__(self, role: str, calls: list[str], *, is_dead: bool = False) -> None:
        self.role, self.calls, self.is_dead = role, calls, is_dead

    def start_profile(self, config: ProfilerConfig, name: str) -> None:
        self.calls.append(f"start {name}")
        if self.is_dead:
            raise RuntimeError(f"{self.role} is dead")

    def stop_profile(self) -> None:
        self.calls.append(f"stop {self.role}")


@pytest.fixture
def loop() -> Any:
    """What profiled steps need of a loop that has done four steps."""
    return SimpleNamespace(global_step=4, reporter=SimpleNamespace(best_effort=BestEffort()))


ACTOR = ["start step5_actor", "work", "stop actor"]
BOTH = ["start step5_rollout", "start step5_actor", "work", "stop rollout", "stop actor"]


@pytest.mark.parametrize("is_dead", [False, True])
def test_all_groups_are_profiled_in_a_chosen_step(loop: Any, is_dead: bool) -> None:
    calls: list[str] = []
    groups: Any = [Group("rollout", calls, is_dead=is_dead), Group("actor", calls)]
    with CheckpointedLoop.profiled(loop, ProfilerConfig(steps=(5, 7)), groups):
        calls.append("work")
    assert calls == BOTH
    assert loop.reporter.best_effort.num_errors == is_dead


def test_profiles_are_written_where_the_step_fails(loop: Any) -> None:
    calls: list[str] = []
    groups: Any = [Group("actor", calls)]

    def fail() -> None:
        with CheckpointedLoop.profiled(loop, ProfilerConfig(steps=(5,)), groups):
            calls.append("work")
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert calls == ACTOR


@pytest.mark.parametrize("steps", [None, (4, 6)])
def test_other_steps_are_not_profiled(loop: Any, steps: tuple[int, ...] | None) -> None:
    calls: list[str] = []
    groups: Any = [Group("actor", calls)]
    with CheckpointedLoop.profiled(loop, ProfilerConfig(steps=steps), groups):
        assert not calls
    assert not calls


class Worker(ProfiledWorker):
    """Keeps what its process would do."""

    def on_profile(self, method: Any, *args: str) -> None:
        self.called = (method.__name__, *args)


@pytest.mark.parametrize(("ranks", "is_profiled"), [((0,), False), ((0, 3), True), (None, True)])
def test_a_rank_is_profiled_if_it_is_chosen(
    ranks: tuple[int, ...] | None, is_profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    worker = Worker()
    worker.start_profile(ProfilerConfig(ranks=ranks, save_path="out", tool="nsys"), "step5_actor")
    assert vars(worker).get("called") == (("start_profile", "nsys", "out/step5_actor_rank3") if is_profiled else None)


def test_engines_and_rollouts_are_profiled() -> None:
    assert issubclass(EngineWorker, ProfiledWorker)
    assert issubclass(RolloutWorker, ProfiledWorker)
