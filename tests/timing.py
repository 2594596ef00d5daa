"""Deadlines for tests that scale with the machine: seconds of an idle one become more where other work runs beside."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

REFERENCE_S = 0.12  # what the reference task takes on an idle core
MEASURED_AGAIN_S = 10.0  # the load changes in the middle of a session


@dataclass
class _Measured:
    slowness: float = 1.0
    expires_s: float = float("-inf")


_MEASURED = _Measured()


def _reference_task() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", "sum(range(1_500_000))"], check=True)
    sum(range(1_500_000))


def slowness() -> float:
    """How many times longer than on an idle machine a fixed task takes now; at least 1."""
    if time.monotonic() >= _MEASURED.expires_s:
        start_s = time.monotonic()
        _reference_task()
        end_s = time.monotonic()
        _MEASURED.slowness = max(1.0, (end_s - start_s) / REFERENCE_S)
        _MEASURED.expires_s = end_s + MEASURED_AGAIN_S
    return _MEASURED.slowness


def scaled_s(idle_s: float) -> float:
    """Seconds to allow now for what an idle machine does within `idle_s`."""
    return idle_s * slowness()


def wait_until(condition: Callable[[], object], idle_s: float = 10.0) -> bool:
    """Wait until the condition holds or the deadline passes; returns whether it holds."""
    end_s = time.monotonic() + scaled_s(idle_s)
    while not condition():
        if time.monotonic() >= end_s:
            return bool(condition())
        time.sleep(0.02)
    return True
