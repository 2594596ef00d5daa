"""The log of draws: the draws of a request come back whole, in order and once, whatever requests shared its steps."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.rollout.sampling.log import SampleLog, by_request

STEPS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=30)


def row(number: int, place: int) -> list[float]:
    return [place, 100 * number + place, -number - place / 8, -place / 4, 1.0]


@given(steps=STEPS, taken_at=st.sets(st.integers(0, 29)))
def test_requests_are_kept_apart_and_forgotten_when_taken(steps: list[list[int]], taken_at: set[int]) -> None:
    log, expected = SampleLog(), dict[int, int]()
    for at, numbers in enumerate(steps):
        log.add(numbers, torch.tensor([row(n, expected.get(n, 0)) for n in numbers], dtype=torch.float64))
        for number in numbers:
            expected[number] = expected.get(number, 0) + 1
        if at in taken_at:
            check(log, numbers[0], expected.pop(numbers[0]))
    for number in range(6):
        check(log, number, expected.get(number, 0))


def taken(log: SampleLog, number: int) -> np.ndarray:
    [answer] = by_request(*log.take([number]))
    return answer


def check(log: SampleLog, number: int, length: int) -> None:
    answer = taken(log, number)
    rows = [row(number, place) for place in range(length)]
    assert answer.tolist() == [r[1:] for r in rows]


def test_the_later_draw_counts_and_parts_of_a_prompt_do_not() -> None:
    log = SampleLog()
    log.add([4], torch.tensor([[-3, 1, 0, 0, 1]], dtype=torch.float64))
    log.add([4], torch.tensor([[0, 7, -1, -1, 1]], dtype=torch.float64))
    log.add([4], torch.tensor([[0, 8, -2, -2, 1]], dtype=torch.float64))
    log.add([4], torch.tensor([[1, 9, -3, -3, 0]], dtype=torch.float64))
    answer = taken(log, 4)
    assert answer.tolist() == [[8, -2, -2, 1], [9, -3, -3, 0]]
    assert len(taken(log, 4)) == 0


def test_running_requests_are_read_from_an_index_on_and_stay() -> None:
    log = SampleLog()
    for at in range(5):
        log.add([4, 6], torch.tensor([[at, 10 + at, -1, -2, 1], [at, 20 + at, -3, -4, 1]], dtype=torch.float64))
    cut, nothing = by_request(*log.take([6, 4], starts=[3, 0], ends=[4, 0]))
    assert (cut.tolist(), len(nothing)) == ([[23, -3, -4, 1]], 0)
    none = log.take([], starts=[], ends=[])
    assert [part.shape for part in none] == [(0,), (0, 4)]
    first, second, unknown = by_request(*log.take([6, 4, 9], starts=[3, 0, 0]))
    assert first.tolist() == [[23, -3, -4, 1], [24, -3, -4, 1]]
    assert (second[:, 0].tolist(), len(unknown)) == ([10, 11, 12, 13, 14], 0)
    assert taken(log, 4)[:, 0].tolist() == [10, 11, 12, 13, 14]
    assert len(taken(log, 4)) == 0
