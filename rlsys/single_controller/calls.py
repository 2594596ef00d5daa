"""Running calls: waiting for their answers with a deadline, and turning failures into one error.

A worker answers every call with a `Header` (small: did it work) beside the value, so that the controller learns of a
failure without fetching data. The wait looks at all ranks at once; the first real cause is raised, not the
broken connections of its peers.
"""

import logging
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.telemetry.recorder import StageReport, merged
from rlsys.utils.errors import RERAISED_ERRORS, DeadlineError, FailedWorker, WorkerError

POLL_S = 1.0
WAITED_S = 30.0
"""How often a wait is reported where no progress bar shows the stage."""
GRACE_S = 0.1
"""How long after an exception other ranks may still fail, of which the earliest is raised."""
SECONDARY_GRACE_S = 3.0
"""How long after the loss of a peer (a broken connection) the rank that caused it may still report why."""
DEFAULT_DEADLINE_S = 600.0
MAX_REPORTS = 10_000

log = logging.getLogger(__name__)
_SECONDARY = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|TCPStore|broken ?pipe"
    r"|connection (closed|reset|refused)|process group.*(abort|timeout)",
    re.IGNORECASE,
)

Deadlines = float | Mapping[str, float]
"""Seconds for every stage, or by stage name (with "default" for the others)."""


def deadline_for(deadlines: Deadlines, stage: str) -> float:
    """How long to wait at a stage."""
    if isinstance(deadlines, Mapping):
        return deadlines.get(stage, deadlines.get("default", DEFAULT_DEADLINE_S))
    return float(deadlines)


@dataclass(frozen=True)
class Failure:
    """What went wrong in a worker."""

    cause: str
    trace: str = ""
    exception: BaseException | None = None
    died: bool = False

    @property
    def is_secondary(self) -> bool:
        """Whether it reads like the loss of a peer and not like a cause."""
        return not self.died and bool(_SECONDARY.search(self.cause))


@dataclass(frozen=True)
class Header:
    """The small half of an answer: whether it worked, and what the worker noted of its stages."""

    failure: Failure | None = None
    report: StageReport | None = None


@dataclass(frozen=True)
class CallSpec:
    """Which method to run. The values sent beside it are its positional arguments, then those named in `names`.

    `role` is the group that calls, `target` the role inside a process that several share. The last `num_padding` rows
    of the batches are repeated ones; the result is returned without them.
    """

    method: str
    role: str
    target: str | None = None
    names: tuple[str, ...] = ()
    num_padding: int = 0


RankCall = tuple[int, CallSpec, tuple[object, ...]]
"""One method call for one rank: the rank, the method, and the values that are sent beside it."""


@dataclass(eq=False)
class Pending:
    """A call on one rank that is waited for; once it is done its backend reads the answer's `header` and `value`.

    `references` are the backend's handles for these two. `is_noted` is set once the stage report of the answer is kept.
    """

    backend: "Backend"
    role: str
    rank: int
    stage: str
    references: tuple[Any, Any]
    is_noted: bool = False


class Backend(ABC):
    """The processes of a group and how they are called; the roles of a colocated class share one.

    By default `references` are the header and the value themselves, and every answer is done at once.
    """

    def __init__(self, world_size: int, deadlines: Deadlines) -> None:
        self.world_size, self.deadlines = world_size, deadlines
        self.reports: deque[StageReport] = deque(maxlen=MAX_REPORTS)

    def drain_stages(self) -> StageReport:
        return merged([self.reports.popleft() for _ in range(len(self.reports))])

    @property
    def present(self) -> Sequence[int]:
        """The ranks that have a process."""
        return range(self.world_size)

    @property
    @abstractmethod
    def workers(self) -> list[object]: ...
    @abstractmethod
    def submit(self, calls: Sequence[RankCall]) -> list[Pending]: ...

    def header(self, call: Pending) -> Header:
        return call.references[0]

    def value(self, call: Pending) -> Any:
        return call.references[1]

    def wait_done(self, pending: Sequence[Pending], timeout_s: float) -> list[Pending]:
        """Those that are done, as soon as there is one, or none after the timeout; they may be of several backends."""
        return list(pending)

    def log_tail(self, rank: int) -> str:
        return ""

    @abstractmethod
    def probe(self, rank: int) -> Pending:
        """A call that does nothing; its answer shows that the rank is alive and idle."""

    @abstractmethod
    def host(self, rank: int) -> str: ...
    @abstractmethod
    def diagnose(self, rank: int) -> str:
        """What a rank that does not answer is doing: its process state and where its code stands."""

    @abstractmethod
    def restart(self, rank: int, deadline_s: float | None) -> None: ...
    @abstractmethod
    def close(self) -> None: ...


class Future:
    """The result of a call that is under way: `collect` makes it of `pending`, the answers of some ranks.

    A failure of their `peers` in the same call ends the wait too.
    """

    def __init__(
        self, pending: Sequence[Pending], collect: Callable[[Sequence[Pending]], object], peers: Sequence[Pending] = ()
    ) -> None:
        self.pending, self._collect, called = list(pending), collect, set(pending)
        self._peers = [peer for peer in peers if peer not in called]

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        return len(self.pending[0].backend.wait_done(self.pending, 0.0)) == len(self.pending)

    def get(self, deadline_s: float | None = None) -> Any:
        """The value; WorkerError if a worker failed, DeadlineError after `deadline_s` (default: the stage's)."""
        finish(self.pending, deadline_s=deadline_s, peers=self._peers)
        return self._collect(self.pending)


def of_rank(call: Pending, peers: Sequence[Pending] = ()) -> Future:
    """The answer of one rank."""
    return Future([call], lambda _: call.backend.value(call), peers)


def finish(
    own: Sequence[Pending], *, deadline_s: float | None = None, peers: Sequence[Pending] = (), idle: Sequence[int] = ()
) -> None:
    """Wait until all `own` have answered; raise the first cause of a failure among them, their peers or idle ranks.

    `idle` are the other ranks of the group: they run no call, so they are probed to notice that one died. After a
    failure the wait continues for a moment, so that the rank that caused it can report before those it broke.
    """
    backend, stage = own[0].backend, own[0].stage
    allowed_s = deadline_for(backend.deadlines, stage) if deadline_s is None else deadline_s
    end_s = time.monotonic() + allowed_s
    missing, others, probes = list(own), list(peers), list[Pending]()
    failed: list[tuple[Pending, Failure]] = []
    grace_end_s = float("inf")
    next_log_s = time.monotonic() + WAITED_S
    while missing:
        now_s = time.monotonic()
        if now_s >= next_log_s and not sys.stderr.isatty():
            next_log_s += WAITED_S
            done, waited_s = len(own) - len(missing), now_s - end_s + allowed_s
            log.info("%s '%s': %d of %d ranks after %.0f s", own[0].role, stage, done, len(own), waited_s)
        if now_s >= min(end_s, grace_end_s):
            break
        done = backend.wait_done([*missing, *others, *probes], min(POLL_S, end_s - now_s, grace_end_s - now_s))
        failed += _failures(done)
        gone = set(done)
        missing = [call for call in missing if call not in gone]
        others = [call for call in others if call not in gone]
        probes = [call for call in probes if call not in gone]
        if failed and grace_end_s == float("inf"):
            grace_end_s = time.monotonic() + SECONDARY_GRACE_S
        if any(not failure.is_secondary for _, failure in failed):  # the cause is known; a death comes before all
            grace_end_s = min(grace_end_s, time.monotonic() + (0 if any(f.died for _, f in failed) else GRACE_S))
        if not done and idle:
            probed = {call.rank for call in probes}
            probes += [backend.probe(rank) for rank in idle if rank not in probed]
    if failed:
        raise _first_cause(failed)
    if missing:
        raise _late(missing, allowed_s)


def _failures(done: Sequence[Pending]) -> Iterator[tuple[Pending, Failure]]:
    """Those that failed. The stage reports that came with the answers are kept, each once."""
    for call in done:
        header = call.backend.header(call)
        if header.report is not None and not call.is_noted:
            call.backend.reports.append(header.report)
            call.is_noted = True
        if header.failure is not None:
            yield call, header.failure


def _first_cause(failed: Sequence[tuple[Pending, Failure]]) -> BaseException:
    """The error to raise: of a death before an exception before the loss of a peer, the first that was reported."""
    ordered = sorted(failed, key=lambda item: (not item[1].died, item[1].is_secondary))
    pending, failure = ordered[0]
    backend = pending.backend
    also = [f"rank {other.rank}: {f.cause.partition(chr(10))[0]}" for other, f in ordered[1:5]]
    cause = "\n".join(filter(None, [failure.cause, failure.trace, f"also failed: {'; '.join(also)}" if also else ""]))
    tail = backend.log_tail(pending.rank)
    where = FailedWorker(pending.role, pending.rank, backend.host(pending.rank), pending.stage, cause, tail)
    if isinstance(failure.exception, RERAISED_ERRORS):
        failure.exception.add_note(f"raised by {where.role} rank {where.rank} on {where.host} at stage '{where.stage}'")
        return failure.exception
    error = WorkerError(where)
    error.__cause__ = failure.exception
    return error


def _late(missing: Sequence[Pending], deadline_s: float) -> DeadlineError:
    """The error for ranks that did not answer."""
    first = missing[0]
    ranks = ", ".join(str(call.rank) for call in missing)
    who = f"{first.role} rank{'s' if len(missing) > 1 else ''} {ranks} on {first.backend.host(first.rank)}"
    states = [f"rank {call.rank}: {call.backend.diagnose(call.rank)}" for call in missing[:4]]
    hint = "\n  ".join(["see what it waits for; raise trainer.deadlines if the work is only slow", *states])
    return DeadlineError(who, first.stage, deadline_s, hint)
