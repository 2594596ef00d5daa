"""The log of draws: the draws of a request come back whole, in order and once, whatever requests shared its steps."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.rollout.sampling.log import SampledSequence, SampleLog, sampled_sequences

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


def taken(log: SampleLog, number: int) -> SampledSequence:
    [answer] = sampled_sequences(*log.take([number]))
    return answer


def check(log: SampleLog, number: int, length: int) -> None:
    answer = taken(log, number)
    rows = [row(number, place) for place in range(length)]
    assert answer.tokens == tuple(r[1] for r in rows)
    assert answer.full_logprobs == tuple(r[2] for r in rows)
    assert answer.sampled_logprobs == tuple(r[3] for r in rows)
    assert answer.finite


def test_the_later_draw_counts_and_parts_of_a_prompt_do_not() -> None:
    log = SampleLog()
    log.add([4], torch.tensor([[-3, 1, 0, 0, 1]], dtype=torch.float64))
    log.add([4], torch.tensor([[0, 7, -1, -1, 1]], dtype=torch.float64))
    log.add([4], torch.tensor([[0, 8, -2, -2, 1]], dtype=torch.float64))
    log.add([4], torch.tensor([[1, 9, -3, -3, 0]], dtype=torch.float64))
    answer = taken(log, 4)
    assert answer.tokens == (8, 9)
    assert answer.full_logprobs == (-2.0, -3.0)
    assert not answer.finite
    assert taken(log, 4).tokens == ()
    assert answer.part(0, 1).tokens == (8,)


def test_running_requests_are_read_from_an_index_on_and_stay() -> None:
    log = SampleLog()
    for at in range(5):
        log.add([4, 6], torch.tensor([[at, 10 + at, -1, -2, 1], [at, 20 + at, -3, -4, 1]], dtype=torch.float64))
    first, second, unknown = sampled_sequences(*log.take([6, 4, 9], starts=[3, 0, 0]))
    assert (first.tokens, second.tokens, unknown.tokens) == ((23, 24), (10, 11, 12, 13, 14), ())
    assert (first.full_logprobs, first.sampled_logprobs, first.finite) == ((-3.0, -3.0), (-4.0, -4.0), True)
    assert taken(log, 4).tokens == (10, 11, 12, 13, 14)
    assert taken(log, 4).tokens == ()
