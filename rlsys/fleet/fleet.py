"""A fleet of rollout replicas on the driver: fixed chunks of rows, served by the least loaded replica, with retries.

Chunks are formed before the first one is sent, so results do not depend on which replica serves which chunk. Each of a
replica's `max_in_flight` threads takes chunks in order; a replica that fails has its health checked, is restarted if
needed and gets the current weights before it serves again. A ledger proves that no row is lost or duplicated.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any

from rlsys.fleet.ledger import Ledger
from rlsys.fleet.replica import (
    Answers,
    Replica,
    Work,
    belong_together,
    num_aborted,
    responses_of,
    rows_of,
    session_of,
    versions_of,
)
from rlsys.protocol import DataProto
from rlsys.rollout.batch import with_request_seeds
from rlsys.types import ModelRequest, ModelResponse, SamplingParams
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError

log = logging.getLogger(__name__)

POLL_S = 1.0
GRACE_S = 30.0
MAX_SESSIONS = 100_000


@dataclass(frozen=True)
class FleetDeadlines:
    """Time limits of one chunk, one health check and one restart."""

    generate_s: float
    health_s: float = 30.0
    restart_s: float = 300.0


@dataclass(eq=False)
class _Chunk:
    """Rows that are sent together; once `ended`, late answers are ignored."""

    number: int
    rows: range
    work: Work
    session: str
    answers: Future[Answers] = field(default_factory=Future)
    causes: list[str] = field(default_factory=list)
    failed_on: set[str] = field(default_factory=set)
    oldest_version: int | None = None
    ended: bool = False


@dataclass(eq=False)
class _ReplicaState:
    """The fleet's state of a replica."""

    replica: Replica
    state: str = "ready"
    restarts: int = 0
    running: list[_Chunk] = field(default_factory=list)

    @property
    def load(self) -> int:
        return sum(len(chunk.rows) for chunk in self.running)


class _WrongVersionError(RuntimeError):
    """An answer has a weight version that was not allowed."""


class RolloutFleet:
    """Routes rows to replicas; `generate`, `generate_sequences` and `sample` may be called from several threads.

    `on_restart(replica)` must bring the current weights to a replica that was restarted or serves a wrong version; it
    runs before the replica serves again. A chunk fails after `max_attempts`, a replica after `max_restarts`.
    Answers with tokens more than `max_staleness` versions older than the version at the time of sending are refused;
    versions are checked once `weights_pushed` has been called.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        chunk_rows: int,
        deadlines: FleetDeadlines,
        on_restart: Callable[[Replica], None] | None = None,
        max_attempts: int = 3,
        max_restarts: int = 3,
        max_in_flight: int = 1,
        max_staleness: int = 0,
    ) -> None:
        if not replicas or chunk_rows < 1 or len({replica.name for replica in replicas}) < len(replicas):
            raise ValueError("a fleet needs replicas with different names and chunks of at least one row")
        self.chunk_rows, self.deadlines, self.on_restart = chunk_rows, deadlines, on_restart
        self.max_attempts, self.max_restarts = max_attempts, max_restarts
        self.max_in_flight, self.max_staleness = max_in_flight, max_staleness
        self.ledger = Ledger()
        self._version: int | None = None
        self._replicas = [_ReplicaState(replica) for replica in replicas]
        self._waiting: list[_Chunk] = []
        self._sessions: OrderedDict[str, _ReplicaState] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._num_chunks = 0
        self._closed = False
        self._change = threading.Condition()
        self._last_event_s = time.monotonic()
        for entry in self._replicas:
            for lane in range(max_in_flight):
                name = f"fleet-{entry.replica.name}-{lane}"
                threading.Thread(target=self._lane, args=(entry,), name=name, daemon=True).start()

    # ---- asking ------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Complete all requests, in order; RolloutError with replicas and causes if a chunk fails."""
        parts = [requests[at : at + self.chunk_rows] for at in range(0, len(requests), self.chunk_rows)]
        return [response for answers in self._complete(parts) for response in responses_of(answers)]

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """Complete every row of a batch of prompts, as `rlsys.rollout.batch.generate_sequences` does."""
        seeded = with_request_seeds(batch)
        parts = [seeded[at : at + self.chunk_rows] for at in range(0, len(seeded), self.chunk_rows)]
        return DataProto.concat([rows_of(answers) for answers in self._complete(parts)])

    async def sample(self, token_ids: Sequence[int], params: SamplingParams, session: str = "") -> ModelResponse:
        """Complete one prompt; requests of one session go to the same replica while it serves."""
        chunk = self._submit([[ModelRequest(tuple(token_ids), params, session=session)]])[0]
        try:
            return responses_of(await asyncio.wrap_future(chunk.answers))[0]
        finally:
            self._cancel([chunk], "cancelled")

    def _complete(self, parts: Sequence[Work]) -> list[Answers]:
        chunks = self._submit(parts)
        try:
            left = [chunk.answers for chunk in chunks]
            while left:
                done, _ = wait(left, timeout=POLL_S, return_when=FIRST_EXCEPTION)
                for answers in done:
                    answers.result()
                left = [answers for answers in left if answers not in done]
                self._check_progress()
            return [chunk.answers.result() for chunk in chunks]
        finally:
            self._cancel(chunks, "cancelled")
            with self._change:
                self.ledger.check()

    def _submit(self, parts: Sequence[Work]) -> list[_Chunk]:
        with self._change:
            if self._closed or all(entry.state == "gone" for entry in self._replicas):
                raise RolloutError("the fleet is closed" if self._closed else self._all_gone())
            chunks = []
            for work in parts:
                rows = self.ledger.issue(len(work))
                chunks.append(_Chunk(self._num_chunks, rows, work, session_of(work)))
                self._num_chunks += 1
            self._waiting += chunks
            self._notify()
            return chunks

    def _cancel(self, chunks: Sequence[_Chunk], reason: str) -> None:
        with self._change:
            for chunk in chunks:
                if not chunk.ended:
                    self._end(chunk, reason, RolloutError(f"chunk {chunk.number} was {reason}"))

    def _check_progress(self) -> None:
        """DeadlineError if no replica has made progress for longer than all deadlines allow."""
        allowed_s = self.deadlines.generate_s + self.deadlines.health_s + 2 * self.deadlines.restart_s + GRACE_S
        if time.monotonic() - self._last_event_s > allowed_s:
            stuck = ", ".join(
                f"{p.replica.name} ({p.state})" for p in self._replicas if p.running or p.state != "ready"
            )
            raise DeadlineError(
                f"rollout fleet: {stuck or 'no replica'}", "generate", allowed_s, "no progress on any replica"
            )

    # ---- serving -----------------------------------------------------------------------------------------------

    def _lane(self, entry: _ReplicaState) -> None:
        while True:
            with self._change:
                while not self._closed and (chunk := self._take(entry)) is None:
                    self._change.wait()
                if self._closed:
                    return
            assert chunk is not None
            problem: Exception | None = None
            try:
                answers = entry.replica.generate(chunk.work, self.deadlines.generate_s)
                self._check_answers(chunk, answers)
            except Exception as error:
                problem = error
            with self._change:
                entry.running.remove(chunk)
                if problem is None:
                    self._settle(chunk, answers)
                    continue
                must_recover = self._suspect(entry)
                self._retry(chunk, entry, problem)
            if must_recover:
                self._recover(entry, problem)

    def _take(self, entry: _ReplicaState) -> _Chunk | None:
        """The first waiting chunk that this replica should serve, if it is free."""
        if entry.state != "ready" or len(entry.running) >= self.max_in_flight:
            return None
        for chunk in self._waiting:
            rivals = [p for p in self._ready() if len(p.running) < self.max_in_flight]
            if self._may_serve(entry, chunk) and not any(
                p.load < entry.load and self._may_serve(p, chunk) for p in rivals
            ):
                self._waiting.remove(chunk)
                entry.running.append(chunk)
                if self._version is not None:
                    chunk.oldest_version = self._version - self.max_staleness
                self._remember(chunk.session, entry)
                self._notify()
                return chunk
        return None

    def _ready(self) -> list[_ReplicaState]:
        return [entry for entry in self._replicas if entry.state == "ready"]

    def _may_serve(self, entry: _ReplicaState, chunk: _Chunk) -> bool:
        """A session stays on its replica and a failed chunk goes to another one, if there is a choice."""
        others = [p for p in self._ready() if p.replica.name not in chunk.failed_on]
        if entry.replica.name in chunk.failed_on and others:
            return False
        owner = self._sessions.get(chunk.session) if chunk.session else None
        return owner is None or owner is entry or owner.state != "ready" or owner.replica.name in chunk.failed_on

    def _remember(self, session: str, entry: _ReplicaState) -> None:
        if session:
            self._sessions[session] = entry
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _check_answers(self, chunk: _Chunk, answers: Answers) -> None:
        if not belong_together(chunk.work, answers):
            raise RolloutError(f"{len(answers)} answers that do not match the {len(chunk.rows)} rows that were sent")
        newest = self._version
        if newest is None or chunk.oldest_version is None:
            return
        versions = versions_of(answers)
        if versions and not chunk.oldest_version <= min(versions) <= max(versions) <= newest:
            span = f"{min(versions)} to {max(versions)}" if len(versions) > 1 else str(min(versions))
            raise _WrongVersionError(f"tokens of weight version {span}, wanted {chunk.oldest_version} to {newest}")

    def _settle(self, chunk: _Chunk, answers: Answers) -> None:
        if chunk.ended:
            return
        self._counts["aborted"] += num_aborted(answers)
        chunk.ended = True
        self.ledger.answer(chunk.rows)
        if not chunk.answers.done():
            chunk.answers.set_result(answers)
        self._notify()

    def _retry(self, chunk: _Chunk, entry: _ReplicaState, problem: Exception) -> None:
        log.warning("chunk %d failed on %s: %s", chunk.number, entry.replica.name, problem)
        self._counts["refused_versions" if isinstance(problem, _WrongVersionError) else "failures"] += 1
        chunk.causes.append(f"{entry.replica.name}: {type(problem).__name__}: {problem}")
        chunk.failed_on.add(entry.replica.name)
        if chunk.ended:
            return
        if len(chunk.causes) < self.max_attempts:
            self._counts["retries"] += 1
            insort(self._waiting, chunk, key=lambda waiting: waiting.number)
        else:
            what = f"rows {chunk.rows.start} to {chunk.rows.stop - 1} failed {len(chunk.causes)} times"
            self._end(chunk, "failed", RolloutError("\n  ".join([what, *chunk.causes])))
        self._notify()

    def _end(self, chunk: _Chunk, reason: str, error: Exception) -> None:
        chunk.ended = True
        self.ledger.drop(chunk.rows, reason)
        if chunk in self._waiting:
            self._waiting.remove(chunk)
        if not chunk.answers.done():
            chunk.answers.set_exception(error)

    # ---- health ------------------------------------------------------------------------------------------------

    def _suspect(self, entry: _ReplicaState) -> bool:
        """Take a replica out of service (the caller holds the lock); False if another thread already did."""
        first = entry.state == "ready"
        entry.state = "recovering" if first else entry.state
        return first

    def _recover(self, entry: _ReplicaState, problem: Exception, *, asked: bool = False) -> None:
        """Recover a suspect replica: by nothing, by weights, or by a restart and weights.

        `asked`: its health check is what failed, so it is not repeated.
        """
        try:
            if isinstance(problem, _WrongVersionError | WeightTransferError):
                self._bring_weights(entry)
            elif asked:
                raise problem
            else:
                entry.replica.health(self.deadlines.health_s)
            state = "ready"
        except Exception as error:
            log.warning("replica %s failed its health check: %s", entry.replica.name, error)
            state = self._restart(entry)
        with self._change:
            entry.state = state
            if all(p.state == "gone" for p in self._replicas):
                for chunk in list(self._waiting):
                    causes = "\n  ".join([self._all_gone(), *chunk.causes])
                    self._end(chunk, "failed", RolloutError(causes))
            self._notify()

    def _restart(self, entry: _ReplicaState) -> str:
        while entry.restarts < self.max_restarts and not self._closed:
            entry.restarts += 1
            with self._change:
                self._counts["restarts"] += 1
                self._last_event_s = time.monotonic()
            try:
                entry.replica.restart(self.deadlines.restart_s)
                self._bring_weights(entry)
                return "ready"
            except Exception as error:
                log.warning("restart %d of %s failed: %s", entry.restarts, entry.replica.name, error)
        log.error("giving up on replica %s after %d restarts", entry.replica.name, entry.restarts)
        return "gone"

    def _bring_weights(self, entry: _ReplicaState) -> None:
        if self.on_restart is not None:
            self.on_restart(entry.replica)

    def _all_gone(self) -> str:
        return f"all {len(self._replicas)} replicas failed after {self.max_restarts} restarts each"

    def check_health(self) -> dict[str, Mapping[str, Any]]:
        """Every replica's health by name; an idle one that fails its check is restarted, its entry has the error."""
        health: dict[str, Mapping[str, Any]] = {}
        for entry in self._replicas:
            if entry.state != "ready" or entry.running:
                health[entry.replica.name] = {"state": entry.state, "rows": entry.load}
                continue
            try:
                health[entry.replica.name] = entry.replica.health(self.deadlines.health_s)
            except Exception as error:
                health[entry.replica.name] = {"error": str(error)}
                with self._change:
                    must_recover = self._suspect(entry)
                if must_recover:
                    self._recover(entry, error, asked=True)
        return health

    def settle(self) -> None:
        """Wait until no replica is being restarted or updated, so that the trainer's weights may change."""
        with self._change:
            longest_s = self.deadlines.health_s + self.deadlines.restart_s
            self._change.wait_for(lambda: all(p.state != "recovering" for p in self._replicas), timeout=longest_s)

    def weights_pushed(self, version: int) -> None:
        """Accept only answers of this version from now on, or of up to `max_staleness` versions before it."""
        with self._change:
            self._version = version

    def metrics(self) -> dict[str, float]:
        """Counts since the start: the ledger's rows, retries, restarts, refused versions; and the serving replicas."""
        with self._change:
            counts = {
                name: self._counts[name] for name in ("failures", "retries", "restarts", "refused_versions", "aborted")
            }
            ready = len(self._ready())
            return {f"rollout/{k}": v for k, v in {**self.ledger.counts(), **counts, "replicas_ready": ready}.items()}

    def close(self) -> None:
        """Cancel unfinished chunks, wait for a running restart and end the threads; the replicas are not closed."""
        with self._change:
            self._closed = True
            unfinished = [*self._waiting, *(chunk for entry in self._replicas for chunk in entry.running)]
        self._cancel(unfinished, "closed")
        with self._change:
            self._notify()
        self.settle()

    def _notify(self) -> None:
        """Record progress and wake waiting threads; the caller holds the lock."""
        self._last_event_s = time.monotonic()
        self._change.notify_all()
