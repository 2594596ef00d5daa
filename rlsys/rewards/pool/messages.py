"""What goes into the reward pool and what comes out of it, and the messages between the pool and its children.

A message is a line of JSON with one of the Structs: graders are given and return what Python's JSON holds.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from rlsys.ipc.framing import WireError
from rlsys.telemetry.jsonl import plain
from rlsys.utils.errors import raised_as

MAX_LINE_BYTES = 256 << 20
RewardStatus = Literal["ok", "timeout", "error"]
T = TypeVar("T")


@dataclass(frozen=True)
class Grader:
    """A `compute_score` function by local file and name; without a path, the built-in routing by data source.

    With `targets`, which its file's `loaded` gets before the first item, it is that of tool processes; of others the
    first answer without a score is a warning.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, object] = field(default_factory=dict)
    targets: Collection[str] | None = None

    def __str__(self) -> str:
        if self.targets is not None:
            return f"the processes of tools, which import {', '.join(sorted(self.targets))},"
        if self.path is None:
            return "the built-in reward functions"
        return f"custom_reward_function.path={self.path}, name={self.name}"


@dataclass(frozen=True)
class RewardItem:
    """What is graded: verl's arguments of `compute_score`."""

    data_source: str
    solution: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] | None = None

    def as_json(self) -> "RewardItem":
        """The same with what JSON can hold of the ground truth and the extra values."""
        return replace(self, ground_truth=plain(self.ground_truth), extra_info=plain(self.extra_info))


@dataclass(frozen=True)
class RewardResult:
    """The score of an item. Unless `status` is "ok", it is 0, `extra` is {"acc": 0} and `message` the cause."""

    score: float
    extra: Mapping[str, Any]
    status: RewardStatus
    seconds: float
    message: str = ""


def failed(status: RewardStatus, seconds: float, message: str) -> RewardResult:
    """The result of an item that has no score."""
    return RewardResult(0.0, {"acc": 0.0}, status, seconds, message)


def late(timeout_s: float) -> str:
    """The message of an item that has no score in time."""
    return f"no score within {timeout_s:g} s"


def reward_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """Counts of timeouts, errors and zeros that a grader returned, and grading seconds per item."""
    seconds = [r.seconds for r in results]
    return {
        "reward/timeouts": float(sum(r.status == "timeout" for r in results)),
        "reward/errors": float(sum(r.status == "error" for r in results)),
        "reward/zeros": float(sum(r.status == "ok" and r.score == 0 for r in results)),
        "reward/seconds/mean": sum(seconds) / len(seconds) if seconds else 0.0,
        "reward/seconds/max": max(seconds, default=0.0),
    }


# ---- from the pool to a worker -----------------------------------------------------------------------------------


class LoadGrader(Struct, tag="load"):
    """The first message: the grader to load, and the seconds that an async one has for each item."""

    grader: Grader
    timeout_s: float


class GradeItem(Struct, tag="grade"):
    """Grade an item."""

    id: int
    item: RewardItem


# ---- from a worker to the pool -----------------------------------------------------------------------------------


class GraderLoaded(Struct, tag="loaded"):
    """The grader is loaded, or what prevents it; an async one takes many items at once."""

    is_async: bool = False
    problem: str = ""


class ItemGraded(Struct, tag="graded"):
    """The result of item `id`."""

    id: int
    result: RewardResult


# ---- from a guard to the pool ------------------------------------------------------------------------------------


class WorkerEnded(Struct, tag="ended"):
    """How the worker's process ended, and the end of its output."""

    cause: str
    tail: str = ""


FromChild = GraderLoaded | ItemGraded | WorkerEnded


def pack(message: Struct) -> bytes:
    """The line of a message; NaN and infinities pass as Python's JSON writes them. ValueError for one too long."""
    line = json.dumps(msgspec.to_builtins(message)).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    return line


def unpack(line: bytes, kind: type[T]) -> T:
    """The message of a line; WireError if it is not one of `kind`."""
    with raised_as(WireError, "a line does not hold a message", ValueError, RecursionError):
        return msgspec.convert(json.loads(line), kind)
