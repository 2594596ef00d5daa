"""What goes into the reward pool and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "timeout", "error"]


@dataclass(frozen=True)
class Grader:
    """A `compute_score` function by local file and name; without a path, the built-in routing by data source."""

    path: str | None = None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
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


@dataclass(frozen=True)
class RewardResult:
    """What became of an item. Unless `status` is "ok" the score is 0, `extra` is {"acc": 0} and `message` says why."""

    score: float
    extra: Mapping[str, Any]
    status: Status
    seconds: float
    message: str = ""


def failed(status: Status, seconds: float, message: str) -> RewardResult:
    """The result of an item that got no score."""
    return RewardResult(0.0, {"acc": 0.0}, status, seconds, message)


def reward_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """Counts of timeouts, errors and zeros that a grader really gave, and grading seconds per item."""
    seconds = [r.seconds for r in results]
    return {
        "reward/timeouts": float(sum(r.status == "timeout" for r in results)),
        "reward/errors": float(sum(r.status == "error" for r in results)),
        "reward/zeros": float(sum(r.status == "ok" and r.score == 0 for r in results)),
        "reward/seconds/mean": sum(seconds) / len(seconds) if seconds else 0.0,
        "reward/seconds/max": max(seconds, default=0.0),
    }
