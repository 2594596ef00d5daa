"""Waiting for what can only be asked for."""

import time
from collections.abc import Callable


def poll_until(is_done: Callable[[], bool], timeout_s: float, *, every_s: float) -> bool:
    """Ask at once, and then every so often, until the answer is yes or the time is over; returns the last answer."""
    end_s = time.monotonic() + timeout_s
    while not (done := is_done()) and time.monotonic() < end_s:
        time.sleep(every_s)
    return done
