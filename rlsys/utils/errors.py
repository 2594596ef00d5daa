"""Errors that users see, one class per kind of cause."""

from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class ConfigError(Exception):
    """A setting is wrong; the message names the key, its value and what to set instead."""


class DataError(Exception):
    """An input row or file is wrong; the message names the file and the row."""


class CheckpointError(Exception):
    """A checkpoint is missing, incomplete, corrupt or belongs to another model."""


class UnsavedCheckpointError(Exception):
    """A checkpoint could not be written, as on a full disk; the earlier ones are untouched."""


class WeightTransferError(Exception):
    """A weight push failed or was incomplete; the engine must not serve until the next complete one."""


RERAISED_ERRORS = (ConfigError, DataError, CheckpointError, WeightTransferError)
"""Errors that mean the same in any process; the driver raises those of workers unchanged."""


class ParityError(Exception):
    """Actor and rollout score the same tokens differently; the message names the worst token and what to check."""


class RolloutError(RuntimeError):
    """Generation failed; the message names the request or the replica and the cause."""


class WrongVersionError(RuntimeError):
    """A token was sampled by another version of the weights than its request allows."""


class RewardError(RuntimeError):
    """Too many answers of a batch could not be graded; the message has the first cause."""


class OptimizerError(RuntimeError):
    """No optimizer step of a model was applied for many training steps; the message names it and what to check."""


class DeadlineError(TimeoutError):
    """A wait timed out; the message names who did not answer, at which stage, and what to check."""

    def __init__(self, who: str, stage: str, deadline_s: float, hint: str = "") -> None:
        self.who, self.stage, self.deadline_s, self.hint = who, stage, deadline_s, hint
        text = f"{who} did not answer within {deadline_s:g} s at stage '{stage}'"
        super().__init__(f"{text}: {hint}" if hint else text)

    def __reduce__(self) -> tuple[type, tuple[str, str, float, str]]:
        return type(self), (self.who, self.stage, self.deadline_s, self.hint)


@contextmanager
def raised_as(kind: type[Exception], message: str, *errors: type[BaseException]) -> Iterator[None]:
    """Raise errors of these classes as one of `kind` that adds their text, in one line, to the message.

    Without classes all errors, with the names of their classes.
    """
    kinds = errors or (Exception, SystemExit)
    try:
        yield
    except kinds as error:
        while isinstance(error, ExceptionGroup):  # "unhandled errors in a TaskGroup" does not say what happened
            error = error.exceptions[0]
        name = "" if errors else f"{type(error).__name__}: "
        raise kind(f"{message}: {name}{' '.join(str(error).split())}") from error


def result_within(future: Future[T], deadline_s: float | None, *, who: str, stage: str, hint: str = "") -> T:
    """The result of a future; DeadlineError unless it is there within `deadline_s`."""
    if not wait([future], deadline_s).done:
        raise DeadlineError(who, stage, deadline_s or 0.0, hint)
    return future.result()


@dataclass(frozen=True)
class FailedWorker:
    """Where a worker failed, why, and the end of its log."""

    role: str
    rank: int
    host: str
    stage: str
    cause: str
    log_tail: str = ""


class WorkerError(RuntimeError):
    """A worker died, hung or raised: one error with role, rank, host, stage, first cause and log tail."""

    def __init__(self, failed: FailedWorker) -> None:
        self.failed = failed
        text = f"{failed.role} rank {failed.rank} on {failed.host} failed at stage '{failed.stage}': {failed.cause}"
        super().__init__(f"{text}\n--- last lines of its log ---\n{failed.log_tail}" if failed.log_tail else text)

    def __reduce__(self) -> tuple[type, tuple[FailedWorker]]:
        return type(self), (self.failed,)
