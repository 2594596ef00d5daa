"""Free-running asynchronous training over a real fleet: ages, order, failures, filters, checkpoints."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlsys.config.schema.trainer import TrainerConfig
from rlsys.fleet.fleet import RolloutFleet
from rlsys.protocol import DataProto, object_array, response_lengths
from rlsys.rewards.manager import Graded
from rlsys.types import Finish, ResponseDelta
from rlsys.utils.errors import ConfigError, DeadlineError, RolloutError
from tests.timing import scaled_s, wait_until
from tests.unit.trainer.asynchronous import (
    BY_LENGTH,
    FEW_FAILURES,
    CountedPrompts,
    LengthManager,
    LengthReplica,
    fleet_over,
    lognormal_lengths,
    prompt_groups,
)
from trainer.async_source import AsyncSource
from trainer.prompt_groups import OpenAnswers, PromptGroups
from trainer.source import GroupFilter
from trainer.staleness_window import StalenessWindow

LENGTHS = lognormal_lengths(mean=20, longest=400)


@dataclass
class Run:
    """A source over one replica, and the trainer's side of a step."""

    source: AsyncSource
    fleet: RolloutFleet
    replica: LengthReplica
    version: int = 0

    def publish(self, version: int) -> None:
        with self.fleet.pushing(version), self.replica.lock:
            self.replica.version = version
        self.version = version
        self.source.published(version)

    def step(self) -> DataProto:
        batch = self.source.next()
        self.publish(self.version + 1)
        return batch

    def steps(self, num_steps: int) -> list[DataProto]:
        return [self.step() for _ in range(num_steps)]


@contextmanager
def running(
    window: StalenessWindow,
    length_of: Callable[[int], int] = LENGTHS,
    *,
    group_filter: GroupFilter | None = None,
    failures: TrainerConfig = FEW_FAILURES,
    speed: int = 8,
    manager: LengthManager = BY_LENGTH,
    deadline_s: float = 20.0,
) -> Iterator[Run]:
    replica = LengthReplica("replica", length_of, speed=speed)
    groups = prompt_groups(window, max_tokens=400, group_filter=group_filter, failures=failures, manager=manager)
    with fleet_over([replica]) as fleet:
        source = AsyncSource(OpenAnswers(groups, fleet), deadline_s=scaled_s(deadline_s))
        try:
            yield Run(source, fleet, replica)
        finally:
            source.close()


def numbers_of(batch: DataProto) -> list[int]:
    return [int(uid[1:]) for uid in batch.non_tensor_batch["uid"]]


@pytest.mark.parametrize("max_staleness", [1, 2, 4, 8])
def test_every_prompt_is_trained_on_in_order_and_no_token_is_too_old(max_staleness: int) -> None:
    ages, numbers, lengths = [], [], []
    with running(StalenessWindow(groups_per_step=2, max_staleness=max_staleness)) as run:
        run.publish(0)
        for _ in range(150):
            batch = run.step()
            ages.append(batch.meta_info["source_metrics"]["training/staleness_max"])
            numbers += numbers_of(batch)
            assert batch.meta_info["source_metrics"].get("rollout/pending", 0) >= 0
            lengths += response_lengths(batch).tolist()
            versions = batch.tensors["weight_versions"][batch.tensors["weight_versions"] >= 0]
            assert int(versions.max()) <= run.version - 1
    assert numbers == list(range(300))
    assert lengths == [LENGTHS(number) for number in numbers]
    assert 1 <= max(ages) <= max_staleness


def test_prompts_that_fail_are_skipped_and_counted() -> None:
    with running(StalenessWindow(groups_per_step=2, max_staleness=2), lambda n: 0 if n in (1, 4) else 9) as run:
        run.publish(0)
        batches = run.steps(4)
    assert [number for batch in batches for number in numbers_of(batch)] == [0, 2, 3, 5, 6, 7, 8, 9]
    assert batches[-1].meta_info["source_metrics"]["rollout/groups_skipped_failed"] == 2


@pytest.mark.parametrize(("in_a_row", "share"), [(2, 1.0), (4, 0.1)])
def test_too_many_failures_end_the_run(in_a_row: int, share: float) -> None:
    fails = (lambda n: 0) if share == 1.0 else (lambda n: 9 * (n % 2))
    failures = TrainerConfig(max_failed_in_a_row=in_a_row, max_failed_share=share)
    with running(StalenessWindow(groups_per_step=2, max_staleness=1), fails, failures=failures) as run:
        run.publish(0)
        with pytest.raises(RolloutError, match=r"(?s)in_a_row=\d or trainer.max_failed_share.* engine likes"):
            run.steps(20)


def test_a_prompt_that_never_ends_is_named_after_the_deadline() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    with running(window, speed=0, deadline_s=0.3) as run:
        run.publish(0)
        with pytest.raises(DeadlineError, match=r"prompt 0 of 4 unfinished ones; step 1 waits.*'generate and grade'"):
            run.step()


def test_an_error_of_the_grader_ends_the_run() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    with running(window, lambda n: 9 + n, manager=LengthManager(12)) as run:
        run.publish(0)
        with pytest.raises(ValueError, match=r"an answer of 1\d tokens"):
            run.steps(3)


def test_weights_may_be_pushed_less_often_than_every_step() -> None:
    ages = []
    with running(StalenessWindow(groups_per_step=2, max_staleness=2)) as run:
        run.publish(0)
        for step in range(1, 41):
            batch = run.source.next()
            ages.append(batch.meta_info["source_metrics"]["training/staleness_max"])
            if step % 3 == 0:
                run.publish(step)
    assert max(ages) == 2


def test_idle_shares_show_which_side_waits() -> None:
    """Each side stands still for four times as long as everything before has taken, and longer than threads wait for a
    core."""
    started = threading.Event()
    window, start_s = StalenessWindow(groups_per_step=2, max_staleness=1), time.monotonic()
    with running(window, lambda n: 60) as run, ThreadPoolExecutor() as trainer:
        run.replica.limit = 0
        run.publish(0)
        step = trainer.submit(lambda: started.set() or run.step())
        assert started.wait(scaled_s(10))
        time.sleep(scaled_s(0.5) + 4 * (time.monotonic() - start_s))
        run.replica.limit = 60
        waits = step.result(scaled_s(10)).meta_info["source_metrics"]
        assert wait_until(lambda: not run.fleet.unfinished())
        time.sleep(scaled_s(0.5) + 4 * (time.monotonic() - start_s))
        trains = run.step().meta_info["source_metrics"]
    assert waits["perf/trainer_idle"] > 0.6 > 0.4 > waits["perf/rollout_idle"]
    assert trains["perf/rollout_idle"] > 0.6 > 0.4 > trains["perf/trainer_idle"]
    assert all(0 <= one["perf/overlap"] <= 1 for one in (waits, trains))


def keep_long(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    long = bool((response_lengths(batch) > 10).any())
    return batch[: len(batch) if long else 0], {"training/filter_groups_kept": float(long)}


def test_filtered_prompts_are_replaced_in_order() -> None:
    kept = [number for number in range(100) if LENGTHS(number) > 10]
    with running(StalenessWindow(groups_per_step=2, max_staleness=2), group_filter=GroupFilter(keep_long, 0)) as run:
        run.publish(0)
        batches = run.steps(8)
    assert [number for batch in batches for number in numbers_of(batch)] == kept[:16]
    metrics = [batch.meta_info["source_metrics"] for batch in batches]
    assert metrics[-1]["rollout/groups_skipped_filtered"] > 0
    assert all(one["training/staleness_max"] <= 2 for one in metrics)


def test_a_filter_that_keeps_too_few_ends_the_run() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    with running(window, lambda n: 5, group_filter=GroupFilter(keep_long, 3)) as run:
        run.publish(0)
        with pytest.raises(ConfigError, match="after 3 generated batches only 0 of 2 prompts"):
            run.step()


def test_a_filter_does_not_end_a_run_that_has_enough_prompts() -> None:
    """They wait for the trainer, while prompts of later steps are filtered and replaced."""
    window = StalenessWindow(groups_per_step=1, max_staleness=3)
    length_of = lambda n: 20 if n == 0 else 5  # noqa: E731
    with running(window, length_of, group_filter=GroupFilter(keep_long, 3)) as run:
        run.publish(0)
        wait_until(lambda: window.skipped["filtered"] >= 8, 10.0)
        assert numbers_of(run.step()) == [0]
        with pytest.raises(ConfigError, match="generated batches only 0 of 1 prompts"):
            run.step()


def test_the_age_of_a_step_is_that_of_its_oldest_branch() -> None:
    window = StalenessWindow(groups_per_step=1, max_staleness=3)
    groups = prompt_groups(window, max_tokens=8)
    window.issued = window.trained = window.version = 3
    groups.start()
    group = groups.open[0]
    group.answers[0].add(ResponseDelta("", (5,), (0.0,), (0.0,), (3,), Finish.STOP))
    groups.grade([group])
    assert group.graded is not None
    group.graded.non_tensor_batch["branches"] = object_array([[{"versions": (3, 1)}]])
    groups.finish(group)
    batch = groups.take()
    assert batch is not None
    assert batch.meta_info["source_metrics"]["training/staleness_max"] == 2


def test_a_checkpoint_keeps_tokens_that_were_drawn_and_prompts_in_order(tmp_path: Path) -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=3)
    with running(window, lambda n: 300 if n == 3 else 20, speed=1) as run:
        run.replica.limit = 40
        run.publish(0)
        first = numbers_of(run.step())
        assert wait_until(lambda: max(len(one.tokens) for one in run.fleet.unfinished()) == 40)
        window.lead = 2.5
        saved = run.source.save(tmp_path)
        state = json.loads(json.dumps(saved))
        run.replica.limit = 400
        run.steps(3)
        assert json.loads(json.dumps(saved)) == state
    kept = DataProto.load_from_disk(tmp_path / "open_prompts.dp")
    drawn = int(response_lengths(kept)[kept.non_tensor_batch["group_number"].tolist().index(3)])
    assert drawn == 40
    window = StalenessWindow(groups_per_step=2, max_staleness=3)
    with running(window, lambda n: 300 if n == 3 else 20) as run:
        run.source.load(state, tmp_path)
        run.publish(1)
        batches = run.steps(4)
    assert batches[0].meta_info["source_metrics"]["rollout/lead"] == 2.5
    assert [*first, *(n for batch in batches for n in numbers_of(batch))] == list(range(10))
    before = kept.tensors["weight_versions"][kept.non_tensor_batch["group_number"].tolist().index(3), :drawn]
    versions = batches[0].tensors["weight_versions"][1, :300]
    assert versions[:drawn].tolist() == before.tolist()
    assert set(versions[drawn:].tolist()) == {1}


def test_an_answer_that_ends_while_a_checkpoint_is_written_is_kept_whole(tmp_path: Path) -> None:
    """Two answers end in one exchange; the futures are resolved one after the other."""
    first_is_resolved, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        first_is_resolved.set()
        go.wait(scaled_s(10))

    with running(StalenessWindow(groups_per_step=2, max_staleness=1), lambda n: 64) as run:
        submit: Any = run.fleet.submit

        def held(work: Any) -> Any:
            futures = submit(work)
            for future in futures:
                future.add_done_callback(hold)
            return futures

        run.fleet.submit = held  # type: ignore[method-assign]
        run.publish(0)
        assert first_is_resolved.wait(scaled_s(10))
        threading.Timer(0.2, go.set).start()  # by then the checkpoint is being written
        run.source.save(tmp_path)
    kept = DataProto.load_from_disk(tmp_path / "open_prompts.dp")
    assert int(response_lengths(kept)[kept.non_tensor_batch["group_number"].tolist().index(1)]) == 64


def test_a_checkpoint_takes_answers_with_and_without_routes_of_experts(tmp_path: Path) -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    saved, loaded = (prompt_groups(window, max_tokens=8, num_answers=2) for _ in range(2))
    saved.start()
    ended = saved.open[0].answers[0]
    ended.add(ResponseDelta("", (5,), (0.0,), (0.0,), (0,), Finish.STOP, np.ones((2, 1, 2), np.int16)))
    loaded.load(json.loads(json.dumps(saved.save(tmp_path))), tmp_path)
    routes = [answer.routed_experts for group in loaded.open for answer in group.answers]
    assert routes[0] is not None
    assert routes[0][:2].tolist() == [[[1, 1]], [[1, 1]]]
    assert routes[1:] == [None] * (len(routes) - 1)


class SometimesManager(LengthManager):
    """Gives a column of numbers for answers to the first prompt only."""

    def grade(self, data: DataProto) -> Graded:
        is_first = data.non_tensor_batch["uid"].tolist() == ["p0"]
        return replace(super().grade(data), extra={"rare": np.array([1.5])} if is_first else {})


def test_a_checkpoint_keeps_of_each_prompt_the_columns_of_its_own_graders(tmp_path: Path) -> None:
    """Those that others were given beside it would be in the rollouts of the resumed run only."""
    window = StalenessWindow(groups_per_step=2, max_staleness=1)
    saved, loaded = (prompt_groups(window, max_tokens=8, manager=SometimesManager()) for _ in range(2))
    saved.start()
    for group in saved.open[:3]:
        group.answers[0].add(ResponseDelta("", (5,), (0.0,), (0.0,), (0,), Finish.STOP))
        saved.grade([group])
        saved.finish(group)
    loaded.load(json.loads(json.dumps(saved.save(tmp_path))), tmp_path)
    for before, after in zip(saved.open, loaded.open, strict=True):
        assert (before.graded is None) == (after.graded is None)
        if before.graded is not None and after.graded is not None:
            columns, own = after.graded.non_tensor_batch, before.graded.non_tensor_batch
            assert {name: column.dtype for name, column in columns.items()} == {n: c.dtype for n, c in own.items()}
            assert after.graded.meta_info == before.graded.meta_info
    assert loaded.open[0].graded is not None
    assert loaded.open[0].graded.non_tensor_batch["rare"].tolist() == [1.5]


def test_a_resume_with_more_lookahead_needs_as_much_more_staleness(tmp_path: Path) -> None:
    def groups_of(max_staleness: int, lookahead: int) -> PromptGroups:
        window = StalenessWindow(groups_per_step=2, max_staleness=max_staleness, lookahead=lookahead)
        return prompt_groups(window, max_tokens=8)

    state = json.loads(json.dumps(groups_of(2, 1).save(tmp_path)))
    with pytest.raises(ConfigError, match=r"set trainer\.max_staleness=3 or more"):
        groups_of(2, 2).load(state, tmp_path)
    groups_of(3, 2).load(state, tmp_path)
    groups_of(2, 0).load(state, tmp_path)


class HeldManager(LengthManager):
    """Grades once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_grading, self.release = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def grade(self, data: DataProto) -> Graded:
        self.thread = threading.current_thread()
        self.is_grading.set()
        self.release.wait(scaled_s(10))
        return super().grade(data)


def test_a_source_that_is_closed_while_it_grades_submits_no_more() -> None:
    manager = HeldManager()
    with running(
        StalenessWindow(groups_per_step=2, max_staleness=2), lambda n: 8 if n == 0 else 400, manager=manager
    ) as run:
        run.replica.limit = 8
        run.publish(0)
        assert manager.is_grading.wait(scaled_s(10))
        run.source.close()
        issued = run.fleet.metrics()["rollout/issued"]
        manager.release.set()
        assert manager.thread is not None
        manager.thread.join(scaled_s(10))
        assert not manager.thread.is_alive()
        counts = run.fleet.metrics()
    assert (counts["rollout/issued"], counts["rollout/pending"]) == (issued, 0)


def test_the_deadline_of_the_first_step_begins_when_its_prompts_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("trainer.async_source.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with running(StalenessWindow(groups_per_step=2, max_staleness=1), lambda n: 9) as run:
        now_s[0] = 1e6  # a checkpoint was loaded and weights were pushed
        run.replica.limit = 0
        run.publish(0)
        threading.Timer(0.1, lambda: setattr(run.replica, "limit", 9)).start()
        assert numbers_of(run.source.next()) == [0, 1]


class EpochPrompts(CountedPrompts):
    """Prompts of a dataset in epochs of 8; other rows begin a new one, as those of a cursor that `restarts`."""

    def __init__(self, dataset: str) -> None:
        super().__init__()
        self.dataset, self.epoch = dataset, 0

    def next(self) -> DataProto:
        if self.position == 8:
            self.epoch, self.position = self.epoch + 1, 0
        rows = super().next()
        named = [f"{self.epoch}-{uid}" for uid in rows.non_tensor_batch["uid"]]
        return DataProto(rows.batch, {"uid": object_array(named)})

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        changed = state["dataset"] != self.dataset
        self.epoch, self.position = (state["epoch"] + 1, 0) if changed else (state["epoch"], state["position"])


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("dataset", ["same", "other"])
def test_a_resume_with_other_rows_has_each_prompt_once(dataset: str, num_steps: int, tmp_path: Path) -> None:
    def groups_over(prompts: EpochPrompts) -> PromptGroups:
        window = StalenessWindow(groups_per_step=3, max_staleness=num_steps)
        return prompt_groups(window, max_tokens=8, prompts=prompts)

    saved, loaded = groups_over(EpochPrompts("same")), groups_over(EpochPrompts(dataset))
    saved.start()
    loaded.load(json.loads(json.dumps(saved.save(tmp_path))), tmp_path)
    before = [group.rows.non_tensor_batch["uid"][0] for group in loaded.open]
    more = [loaded._next_rows().non_tensor_batch["uid"][0] for _ in range(8)]
    assert len({*before, *more}) == len(before) + 8
    if dataset == "other":
        assert more == [f"{int(before[-1][0]) + 1}-p{number}" for number in range(8)]


class LearningPrompts(CountedPrompts):
    """Prompts whose order depends on what was learned from batches."""

    learned = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "learned": self.learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.learned = state["learned"]


def test_what_was_learned_since_the_last_draw_is_in_the_checkpoint(tmp_path: Path) -> None:
    def groups_over(prompts: LearningPrompts) -> PromptGroups:
        return prompt_groups(StalenessWindow(groups_per_step=1, max_staleness=1), max_tokens=8, prompts=prompts)

    before, after = LearningPrompts(), LearningPrompts()
    groups = groups_over(before)
    groups.start()
    before.learned += 2  # a draw gives the prompts of four steps
    state = json.loads(json.dumps(groups.save(tmp_path)))
    groups_over(after).load(state, tmp_path)
    assert after.state_dict() == before.state_dict()
