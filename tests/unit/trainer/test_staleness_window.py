"""The window over prompts, by model check: every order in which a few groups start, finish, fail and are trained."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.staleness_window import StalenessWindow

NUM_GROUPS = 6


@dataclass(frozen=True)
class Run:
    """A window's saved state, the served version, and the version that each open group started under."""

    state: str
    version: int
    started: tuple[tuple[int, int], ...] = ()
    unfinished: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()


def window_of(run: Run, groups_per_step: int, max_staleness: int, lookahead: int) -> StalenessWindow:
    """The window of a run, as after a restart: nothing but the saved state and the version is known."""
    window = StalenessWindow(groups_per_step=groups_per_step, max_staleness=max_staleness, lookahead=lookahead)
    if run.state:
        window.load_state_dict(json.loads(run.state))
    window.version = run.version
    return window


def successors(run: Run, groups_per_step: int, max_staleness: int, lookahead: int) -> Iterator[Run]:
    """Every run that one event leads to; each event is preceded by a save and a restart."""
    settings = (groups_per_step, max_staleness, lookahead)

    def saved(window: StalenessWindow) -> str:
        counts = window.counts()
        skipped = sum(count for name, count in counts.items() if name.startswith("skipped_"))
        assert counts["issued"] == counts["trained"] + counts["open"] + skipped
        return json.dumps(window.state_dict())

    window = window_of(run, *settings)
    if window.room and window.issued < NUM_GROUPS:
        number = window.start()
        started = (*run.started, (number, run.version))
        yield replace(run, state=saved(window), started=started, unfinished=(*run.unfinished, number))
    for number in run.unfinished:
        left = tuple(n for n in run.unfinished if n != number)
        window = window_of(run, *settings)
        window.finish(number)
        yield replace(run, state=saved(window), unfinished=left)
        window = window_of(run, *settings)
        window.skip(number, "failed")
        yield replace(run, state=saved(window), unfinished=left)
    window = window_of(run, *settings)
    step = window.step
    if step == run.version + 1 and (numbers := window.take()) is not None:
        versions = dict(run.started)
        assert window.check_age(min(versions[n] for n in numbers)) == max(step - 1 - versions[n] for n in numbers)
        assert not set(numbers) & set(run.trained)
        if lookahead == 0:
            assert all(n > max(run.trained, default=-1) for n in numbers)
        yield replace(run, state=saved(window), version=step, trained=(*run.trained, *numbers))


def has_progress(window: StalenessWindow) -> bool:
    """Whether a window whose groups all finish reaches the next step, however small its lead is."""
    window.lead = 0.0
    for number in window.open:
        window.finish(number)
    for _ in range(window.room):
        window.finish(window.start())
    return window.take() is not None


@pytest.mark.parametrize(("max_staleness", "lookahead"), [(0, 0), (1, 0), (2, 0), (3, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("groups_per_step", [1, 2])
def test_every_schedule_keeps_the_age_loses_nothing_and_gets_on(
    groups_per_step: int, max_staleness: int, lookahead: int
) -> None:
    settings = (groups_per_step, max_staleness, lookahead)
    todo = {Run("", 0)}
    seen: set[Run] = set()
    oldest = 0
    while todo:
        run = todo.pop()
        seen.add(run)
        assert has_progress(window_of(run, *settings)), run
        for after in successors(run, *settings):
            versions = dict(run.started)
            new = set(after.trained) - set(run.trained)
            oldest = max([oldest, *(after.version - 1 - versions[n] for n in new)])
            if after not in seen:
                todo.add(after)
    assert oldest == min(max_staleness, (NUM_GROUPS - 1) // groups_per_step)


@given(st.data())
def test_long_runs_with_lookahead_and_any_lead_keep_the_age(data: st.DataObject) -> None:
    groups_per_step, lookahead = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    window = StalenessWindow(
        groups_per_step=groups_per_step, max_staleness=lookahead + data.draw(st.integers(0, 3)), lookahead=lookahead
    )
    versions: dict[int, int] = {}
    running: list[int] = []
    window.lead = data.draw(st.floats(0.0, 4.0))
    for _ in range(60):
        while window.room:
            number = window.start()
            versions[number] = window.version
            running.append(number)
        number = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            window.skip(number, "filtered")
        else:
            window.finish(number)
        while (numbers := window.take()) is not None:
            assert len(numbers) == groups_per_step
            window.check_age(min(versions[n] for n in numbers))
            window.version += 1
            window.adapt_lead(data.draw(st.floats(0.0, 2.0)))
            assert 1.0 <= window.lead <= window.most_ahead + 1
        window.counts()


def leads_and_ages(max_staleness: int, answer_s: Sequence[float]) -> tuple[list[float], list[int]]:
    """The lead and the largest age of each step when the trainer takes a second for each, and an answer that starts in
    this step so many."""
    window = StalenessWindow(groups_per_step=4, max_staleness=max_staleness)
    window.lead = 1.0
    running: list[tuple[float, int]] = []
    versions: dict[int, int] = {}
    leads, ages, now_s = list[float](), list[int](), 0.0
    for step_answer_s in answer_s:
        start_s = now_s
        while True:
            while window.room:
                heappush(running, (now_s + step_answer_s, window.start()))
                versions[window.issued - 1] = window.version
            while running and running[0][0] <= now_s:
                window.finish(heappop(running)[1])
            if (numbers := window.take()) is not None:
                break
            now_s = running[0][0]
        window.adapt_lead(now_s - start_s)
        leads.append(window.lead)
        ages.append(window.version - min(versions[n] for n in numbers))
        now_s += 1.0
        window.version += 1
    return leads, ages


def test_prompts_start_all_steps_ahead_of_a_fast_trainer_and_one_ahead_of_a_slow_one() -> None:
    leads, ages = leads_and_ages(4, [6.0] * 20 + [0.5] * 200)
    assert leads[10] > 4.0
    assert max(ages) == ages[15] == 4
    assert leads[30:] == sorted(leads[30:], reverse=True), "the trainer does not wait any more"
    assert leads[75] < 2.1
    assert leads[-1] == ages[-1] == 1


def test_the_lead_settles_where_the_trainer_hardly_waits() -> None:
    leads, ages = leads_and_ages(8, [2.5] * 200)
    assert 2.5 < min(leads[4:]) < max(leads[4:]) < 5.0
    assert set(ages[60:]) == {3, 4}


def test_a_token_that_is_too_old_is_refused() -> None:
    window = StalenessWindow(groups_per_step=1, max_staleness=1)
    for _ in range(2):
        window.finish(window.start())
    window.take()
    window.take()
    assert window.check_age(0) == 1
    with pytest.raises(AssertionError, match="step 2 got a token of version -1, 2 versions old"):
        window.check_age(-1)


def test_lookahead_takes_finished_groups_past_a_slow_one() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=2, lookahead=1)
    numbers = [window.start() for _ in range(window.room)]
    assert numbers == [0, 1, 2, 3]
    for number in (1, 2):
        window.finish(number)
    assert window.take() == [1, 2]
    window.version = 1
    window.finish(window.start())
    assert (window.open, window.take()) == ([0, 3, 4], None)


def test_no_group_starts_that_only_a_step_after_the_last_would_need() -> None:
    window = StalenessWindow(groups_per_step=2, max_staleness=3, num_steps=2)
    numbers = [window.start() for _ in range(window.room)]
    assert (numbers, window.room) == ([0, 1, 2, 3], 0)
    window.skip(1, "failed")
    assert window.room == 1, "another takes its place"
    assert window.counts() == {"issued": 4, "trained": 0, "open": 3, "skipped_failed": 1}
