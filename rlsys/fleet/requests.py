"""What a fleet needs of its replicas, and what it keeps of them and of its requests."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from rlsys.rollout.partial import PartialResponse
from rlsys.types import ModelRequest, ModelResponse, ResponseDelta


class WrongVersionError(RuntimeError):
    """A token has a weight version that was not allowed."""


class Replica(Protocol):
    """One serving engine and the process it lives in. Every method answers or raises by its deadline."""

    @property
    def name(self) -> str: ...
    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        """As the engine's `exchange`."""

    def health(self, deadline_s: float) -> Mapping[str, object]:
        """The engine's `health`; raises if the replica is not alive."""

    def restart(self, deadline_s: float) -> None:
        """Replace the process, alive or not, by a new one that has loaded its model."""


@dataclass(frozen=True)
class FleetDeadlines:
    """Time limits: of one exchange, of a replica's silence while it has requests, of a health check and a restart."""

    generate_s: float
    exchange_s: float = 30.0
    health_s: float = 30.0
    restart_s: float = 300.0


@dataclass(eq=False)
class RequestBatch:
    """Requests that are placed together. A fixed batch is decoded alone, and repeated as a whole if that fails."""

    fixed: bool
    requests: list["FleetRequest"] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    failed_on: set[str] = field(default_factory=set)


@dataclass(eq=False)
class FleetRequest:
    """A request of the fleet, one of its `batch`, its tokens so far and its number; it came with `num_given` tokens."""

    number: int
    partial: PartialResponse
    num_given: int
    batch: RequestBatch
    answer: Future[ModelResponse] = field(default_factory=Future)
    oldest_version: int | None = None

    def __post_init__(self) -> None:
        self.batch.requests.append(self)

    def wrong_version(self, delta: ResponseDelta, newest: int | None) -> WrongVersionError | None:
        """What is wrong with the weight versions of these tokens, if both bounds are known."""
        oldest = self.oldest_version
        if oldest is None or newest is None or not delta.versions:
            return None
        first, last = min(delta.versions), max(delta.versions)
        if oldest <= first and last <= newest:
            return None
        return WrongVersionError(f"tokens of weight versions {first} to {last}, wanted {oldest} to {newest}")


@dataclass(eq=False)
class ReplicaState:
    """The fleet's state of a replica: what is placed there, and by id what its engine has."""

    replica: Replica
    state: str = "ready"
    restarts: int = 0
    failures: int = 0
    placed: list[FleetRequest] = field(default_factory=list)
    running: dict[str, FleetRequest] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    is_exchanging: bool = False
    heard_s: float = 0.0
    exchanged_s: float = float("-inf")
    reported_s: float | None = None
    drawn: Counter[str] = field(default_factory=Counter)
    """Tokens by id since all running requests were reported."""
    idle_s: float = 0.0
    idle_from_s: float | None = None

    def report(self, deltas: Sequence[ResponseDelta]) -> tuple[int, float, int, int] | None:
        """Requests, seconds, decode steps and tokens from one report of all that runs to the next, if this is one."""
        self.drawn.update({delta.rid: len(delta.tokens) for delta in deltas if delta.tokens})
        since_s, drawn = self.reported_s, self.drawn
        is_report = any(delta.tokens and delta.finish is None for delta in deltas)
        if is_report or not self.running:
            self.drawn, self.reported_s = Counter(), self.exchanged_s if self.running else None
        if not is_report or since_s is None:
            return None
        return len(drawn), self.exchanged_s - since_s, max(drawn.values()), drawn.total()

    def idle_until(self, now_s: float) -> float:
        """Seconds without work since the start."""
        return self.idle_s + (0.0 if self.idle_from_s is None else now_s - self.idle_from_s)

    @property
    def held(self) -> list[FleetRequest]:
        return [*self.placed, *self.running.values()]

    @property
    def load(self) -> int:
        return len(self.placed) + len(self.running)
