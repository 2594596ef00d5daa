"""Waiting until what is asked for is true, or the time is over."""

import time

from rlsys.utils.polling import poll_until


def test_an_answer_is_taken_as_soon_as_it_is_yes() -> None:
    answers = iter([False, False, True])
    assert poll_until(lambda: next(answers), 60.0, every_s=0.001)
    assert list(answers) == []


def test_without_time_the_question_is_asked_once() -> None:
    asked: list[int] = []
    assert not poll_until(lambda: bool(asked.append(1)), 0.0, every_s=60.0)
    assert asked == [1]


def test_the_last_answer_is_returned_when_the_time_is_over() -> None:
    start_s = time.monotonic()
    assert not poll_until(lambda: False, 0.05, every_s=0.01)
    assert time.monotonic() - start_s >= 0.05
