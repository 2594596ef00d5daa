"""How a job ends: well, or with one clear error and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rlsys.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineError,
    RolloutError,
    WeightTransferError,
    WorkerError,
)

TOLD = (ConfigError, DataError, CheckpointError, DeadlineError, RolloutError, WeightTransferError, WorkerError)


@dataclass
class Outcome:
    """0 for a finished job, 1 for a failed one, 2 for a wrong configuration, 130 for a stopped one."""

    exit_code: int = 0


@contextmanager
def told(out: TextIO) -> Iterator[Outcome]:
    """Print the errors that mean something to a person without a traceback; others pass."""
    outcome = Outcome()
    try:
        yield outcome
    except TOLD as error:
        print(f"rlsys: {type(error).__name__}: {error}", file=out)
        outcome.exit_code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("rlsys: stopped by the keyboard", file=out)
        outcome.exit_code = 130
