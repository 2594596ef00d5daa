"""What a fleet needs of its replicas, and what it keeps of them and of its requests."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rlsys.rollout.partial import PartialResponse
from rlsys.types import ModelRequest, ModelResponse, ResponseDelta
from rlsys.utils.errors import WrongVersionError


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
    """Requests that are placed together. A fixed batch is decoded alone, and repeated as a whole if that fails.

    `causes` are the errors of its attempts, `failed_on` the names of the replicas that they were on; tokens that come
    for a batch that is not fixed clear both.
    """

    fixed: bool
    requests: list["FleetRequest"] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    failed_on: set[str] = field(default_factory=set)


@dataclass(eq=False)
class FleetRequest:
    """A request of the fleet: its number, its tokens so far, the first `num_given` of which it came with, its batch.

    It adds itself to its batch. Since it was placed its tokens must be of `oldest_version` or newer weights.
    """

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


ReplicaStatus = Literal["ready", "recovering", "joining", "away", "gone"]
"""The states of a replica.

- "ready": it serves.
- "recovering": it failed; its health is checked, or it is restarted.
- "joining": it runs, and serves after the next push.
- "gone": it was given up.

An ElasticFleet gives none up, and has one more:

- "away": it has no process, and is started where the cluster has room.
"""


@dataclass(eq=False)
class ReplicaState:
    """The fleet's state of a replica: the requests placed there, and by id those that its engine has."""

    replica: Replica
    state: ReplicaStatus = "ready"
    restarts: int = 0
    """Since the last push."""
    failures: int = 0
    """Failed requests since a request got a token."""
    placed: list[FleetRequest] = field(default_factory=list)
    """To be handed in by the next exchange."""
    running: dict[str, FleetRequest] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    """Ids that the next exchange cancels."""
    is_exchanging: bool = False
    heard_s: float = 0.0
    """When it last gave a token, or got work after it had none."""
    exchanged_s: float = float("-inf")
    """When it last answered an exchange."""
    reported_s: float | None = None
    """When all running requests were last reported; None if a report cannot be measured from there."""
    drawn: Counter[str] = field(default_factory=Counter)
    """Tokens by id since then."""
    idle_s: float = 0.0
    """Seconds without work, up to `idle_from_s` if it has none now."""
    idle_from_s: float | None = None

    def report(self, deltas: Sequence[ResponseDelta]) -> tuple[int, float, int, int] | None:
        """(requests, seconds, decode steps, tokens) since the last report, if these deltas are one of all that runs."""
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
