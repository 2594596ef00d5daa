"""How a job ends: well, or with one clear error and an exit code."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from rlsys.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineError,
    ParityError,
    RolloutError,
    WeightTransferError,
    WorkerError,
)

TOLD = (
    ConfigError,
    DataError,
    CheckpointError,
    DeadlineError,
    ParityError,
    RolloutError,
    WeightTransferError,
    WorkerError,
)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM)


@dataclass
class Outcome:
    """0 for a finished job, 1 for a failed one, 2 for a wrong configuration, 130 or 143 for a stopped one."""

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
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"rlsys: a file could not be written or read: {error}", file=out)
        outcome.exit_code = 1
    except KeyboardInterrupt:
        print("rlsys: stopped by the keyboard", file=out)
        outcome.exit_code = 130
    except SystemExit as stop:
        if stop.code != signal.SIGTERM:
            raise
        print("rlsys: stopped by SIGTERM", file=out)
        outcome.exit_code = 128 + signal.SIGTERM


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SystemExit(SIGTERM) where the signal arrives, for `told`; to be entered once Ray is connected.

    Ray's own handler aborts the process three seconds after the signal, whatever is being cleaned up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_root(path: Path) -> None:
    """Make the run's folder and write in it once, before anything heavy starts; ConfigError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path) as probe:
            probe.write(b" ")
    except OSError as error:
        raise ConfigError(f"trainer.default_local_dir={path}: nothing can be written there: {error}") from error
