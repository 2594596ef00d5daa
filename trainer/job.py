"""How a job runs from the command line: expected errors in one line, an orderly end on SIGTERM, a summary.

Imports nothing heavy: the entry points import it together with the configuration.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO, TypeVar

from rlsys.config import EvalConfig, PPOConfig, RMConfig, SFTConfig, main_config
from rlsys.config.schema.trainer import RunConfig
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

C = TypeVar("C", PPOConfig, SFTConfig, RMConfig, EvalConfig)
EXPECTED_ERRORS = (
    ConfigError,
    DataError,
    CheckpointError,
    DeadlineError,
    ParityError,
    RolloutError,
    WeightTransferError,
    WorkerError,
)
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM)
OUTPUTS = {
    "metrics": "metrics.jsonl",
    "evaluation": "evaluation.json",
    "rollouts": "rollouts/index.html",
    "timeline": "timeline.json",
    "memory": "memory.txt",
    "checkpoint": "latest_checkpointed_iteration.txt",
}


def checked_config(argv: Sequence[str] | None, schema: type[C]) -> C:
    """The configuration of the command line, printed with its plan; exits with 2 and a message if it is wrong."""
    return main_config(sys.argv[1:] if argv is None else argv, schema, memory=_memory_line)


def _memory_line(config: C) -> str:
    if not isinstance(config, PPOConfig):
        return ""
    from rlsys.planning.advice import memory_line

    return memory_line(config)


def run_job(config: C, job: Callable[[C], str | None]) -> int:
    """Run `job` and print a summary; returns the exit code (see `Outcome`).

    What `job` returns replaces the first line of the summary, "done in N s".
    """
    from rlsys.telemetry.log import setup_logging

    setup_logging()
    start = time.perf_counter()
    with report_errors(sys.stderr) as outcome:
        make_root(Path(config.trainer.default_local_dir))
        headline = job(config) or f"rlsys: done in {time.perf_counter() - start:.0f} s"
        print("\n".join([headline, *output_lines(config.trainer)]))
    return outcome.exit_code


def output_lines(run: RunConfig) -> list[str]:
    """Where the run left its results: a line for each of `OUTPUTS` that exists."""
    root = Path(run.default_local_dir)
    paths = {name: root / path for name, path in OUTPUTS.items()}
    if folder := getattr(run, "rollout_data_dir", None):
        paths["rollouts"] = Path(folder) / "index.html"
    return [f"  {name:<11}{path}" for name, path in paths.items() if path.exists()]


@dataclass
class Outcome:
    """0 for a finished job, 1 for a failed one, 2 for a wrong configuration, 130 or 143 for a stopped one."""

    exit_code: int = 0


@contextmanager
def report_errors(out: TextIO) -> Iterator[Outcome]:
    """Print expected errors without a traceback and re-raise the rest."""
    outcome = Outcome()
    try:
        yield outcome
    except EXPECTED_ERRORS as error:
        print(f"rlsys: {type(error).__name__}: {error}", file=out)
        outcome.exit_code = 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        if error.errno not in DISK_ERRNOS:
            raise
        print(f"rlsys: a file could not be written or read: {error}", file=out)
        outcome.exit_code = 1
    except KeyboardInterrupt:
        print("rlsys: interrupted (Ctrl-C)", file=out)
        outcome.exit_code = 130
    except SystemExit as stop:
        if stop.code != signal.SIGTERM:
            raise
        print("rlsys: stopped by SIGTERM", file=out)
        outcome.exit_code = 128 + signal.SIGTERM


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit(SIGTERM) where the signal arrives, for `report_errors`; enter it once Ray is connected.

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
        raise ConfigError(f"trainer.default_local_dir={path}: cannot write there: {error}") from error
