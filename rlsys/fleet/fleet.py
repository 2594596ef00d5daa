"""A fleet of rollout replicas on the driver: fixed chunks of rows, whoever is free serves them, failures are retried.

The composition of the chunks is settled before the first one is sent, so results do not depend on who served which. One
thread a lane (`max_in_flight` lanes a replica) takes chunks in their order; a replica that fails is examined, restarted
if need be, and given the right weights before it serves again. A ledger proves that no row is lost or doubled.
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
SPARE_S = 30.0
MAX_SESSIONS = 100_000


@dataclass(frozen=True)
class FleetDeadlines:
    """The longest one chunk, one health check and one restart may take."""

    generate_s: float
    health_s: float = 30.0
    restart_s: float = 300.0


@dataclass(eq=False)
class _Chunk:
    """Rows that travel together. `ended` closes it for answers that come too late."""

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
class _Place:
    """A replica as the fleet sees it."""

    replica: Replica
    state: str = "ready"
    draining: bool = False
    restarts: int = 0
    running: list[_Chunk] = field(default_factory=list)

    @property
    def load(self) -> int:
        return sum(len(chunk.rows) for chunk in self.running)

    @property
    def open(self) -> bool:
        return self.state == "ready" and not self.draining


class _WrongVersionError(RuntimeError):
    """An answer was made by weights that it must not have been made by."""


class RolloutFleet:
    """Routes rows to replicas; `generate`, `generate_sequences` and `sample` may be called from several threads.

    `on_restart(replica)` must bring the current weights to a replica that was restarted or serves a wrong version; it
    runs before the replica serves again. A chunk is given up after `max_attempts`, a replica after `max_restarts`.
    Answers whose tokens are older than `max_staleness` versions before the version of the time they were sent are
    refused; versions are checked once `weights_pushed` was called.
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
            raise ValueError("a fleet needs replicas of different names and chunks of at least one row")
        self.chunk_rows, self.deadlines, self.on_restart = chunk_rows, deadlines, on_restart
        self.max_attempts, self.max_restarts = max_attempts, max_restarts
        self.max_in_flight, self.max_staleness = max_in_flight, max_staleness
        self.ledger = Ledger()
        self._version: int | None = None
        self._places = [_Place(replica) for replica in replicas]
        self._waiting: list[_Chunk] = []
        self._sessions: OrderedDict[str, _Place] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._num_chunks = 0
        self._closed = False
        self._change = threading.Condition()
        self._last_event_s = time.monotonic()
        for place in self._places:
            for lane in range(max_in_flight):
                name = f"fleet-{place.replica.name}-{lane}"
                threading.Thread(target=self._lane, args=(place,), name=name, daemon=True).start()

    # ---- asking ------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Complete all requests, in their order; RolloutError naming replicas and causes if a chunk is given up."""
        parts = [requests[at : at + self.chunk_rows] for at in range(0, len(requests), self.chunk_rows)]
        return [response for answers in self._complete(parts) for response in responses_of(answers)]

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """Complete every row of a batch of prompts, as `rlsys.rollout.batch.generate_sequences` does."""
        seeded = with_request_seeds(batch)
        parts = [seeded[at : at + self.chunk_rows] for at in range(0, len(seeded), self.chunk_rows)]
        return DataProto.concat([rows_of(answers) for answers in self._complete(parts)])

    async def sample(self, token_ids: Sequence[int], params: SamplingParams, session: str = "") -> ModelResponse:
        """Complete one prompt; requests of one session go to the same replica as long as it serves."""
        chunk = self._submit([[ModelRequest(tuple(token_ids), params, session=session)]])[0]
        try:
            return responses_of(await asyncio.wrap_future(chunk.answers))[0]
        finally:
            self._give_up([chunk], "cancelled")

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
            self._give_up(chunks, "cancelled")
            with self._change:
                self.ledger.check()

    def _submit(self, parts: Sequence[Work]) -> list[_Chunk]:
        with self._change:
            if self._closed or all(place.state == "gone" for place in self._places):
                raise RolloutError("the fleet is closed" if self._closed else self._all_gone())
            chunks = []
            for work in parts:
                rows = self.ledger.issue(len(work))
                chunks.append(_Chunk(self._num_chunks, rows, work, session_of(work)))
                self._num_chunks += 1
            self._waiting += chunks
            self._happened()
            return chunks

    def _give_up(self, chunks: Sequence[_Chunk], reason: str) -> None:
        with self._change:
            for chunk in chunks:
                if not chunk.ended:
                    self._end(chunk, reason, RolloutError(f"chunk {chunk.number} was {reason}"))

    def _check_progress(self) -> None:
        """Replicas answer by their deadlines; should one not, this ends the wait."""
        allowed_s = self.deadlines.generate_s + self.deadlines.health_s + 2 * self.deadlines.restart_s + SPARE_S
        if time.monotonic() - self._last_event_s > allowed_s:
            who = ", ".join(f"{p.replica.name} ({p.state})" for p in self._places if p.running or p.state != "ready")
            raise DeadlineError(
                f"rollout fleet: {who or 'no replica'}", "generate", allowed_s, "nothing happens any more"
            )

    # ---- serving -----------------------------------------------------------------------------------------------

    def _lane(self, place: _Place) -> None:
        while True:
            with self._change:
                while not self._closed and (chunk := self._take(place)) is None:
                    self._change.wait()
                if self._closed:
                    return
            assert chunk is not None
            problem: Exception | None = None
            try:
                answers = place.replica.generate(chunk.work, self.deadlines.generate_s)
                self._check_answers(chunk, answers)
            except Exception as error:
                problem = error
            with self._change:
                place.running.remove(chunk)
                if problem is None:
                    self._settle(chunk, answers)
                    continue
                must_recover = self._suspect(place)
                self._retry(chunk, place, problem)
            if must_recover:
                self._recover(place, problem)

    def _take(self, place: _Place) -> _Chunk | None:
        """The first waiting chunk that this replica should serve, if it is free."""
        if not place.open or len(place.running) >= self.max_in_flight:
            return None
        for chunk in self._waiting:
            rivals = (p for p in self._places if p.open and len(p.running) < self.max_in_flight)
            if self._may_serve(place, chunk) and not any(
                p.load < place.load and self._may_serve(p, chunk) for p in rivals
            ):
                self._waiting.remove(chunk)
                place.running.append(chunk)
                if self._version is not None:
                    chunk.oldest_version = self._version - self.max_staleness
                self._remember(chunk.session, place)
                self._happened()
                return chunk
        return None

    def _may_serve(self, place: _Place, chunk: _Chunk) -> bool:
        """A session stays where it was; a chunk that failed goes elsewhere; both only as long as there is a choice."""
        others = [p for p in self._places if p.open and p.replica.name not in chunk.failed_on]
        if place.replica.name in chunk.failed_on and others:
            return False
        owner = self._sessions.get(chunk.session) if chunk.session else None
        return owner is None or owner is place or not owner.open or owner.replica.name in chunk.failed_on

    def _remember(self, session: str, place: _Place) -> None:
        if session:
            self._sessions[session] = place
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _check_answers(self, chunk: _Chunk, answers: Answers) -> None:
        if not belong_together(chunk.work, answers):
            raise RolloutError(
                f"{len(answers)} answers that do not belong to the {len(chunk.rows)} rows that were sent"
            )
        newest = self._version
        if newest is None or chunk.oldest_version is None:
            return
        versions = versions_of(answers)
        if versions and not chunk.oldest_version <= min(versions) <= max(versions) <= newest:
            found = f"{min(versions)} to {max(versions)}" if len(versions) > 1 else str(min(versions))
            raise _WrongVersionError(f"tokens of weight version {found}, wanted {chunk.oldest_version} to {newest}")

    def _settle(self, chunk: _Chunk, answers: Answers) -> None:
        if chunk.ended:
            return
        self._counts["aborted"] += num_aborted(answers)
        chunk.ended = True
        self.ledger.answer(chunk.rows)
        if not chunk.answers.done():
            chunk.answers.set_result(answers)
        self._happened()

    def _retry(self, chunk: _Chunk, place: _Place, problem: Exception) -> None:
        log.warning("chunk %d failed on %s: %s", chunk.number, place.replica.name, problem)
        self._counts["refused_versions" if isinstance(problem, _WrongVersionError) else "failures"] += 1
        chunk.causes.append(f"{place.replica.name}: {type(problem).__name__}: {problem}")
        chunk.failed_on.add(place.replica.name)
        if chunk.ended:
            return
        if len(chunk.causes) < self.max_attempts:
            self._counts["retries"] += 1
            insort(self._waiting, chunk, key=lambda waiting: waiting.number)
        else:
            what = f"rows {chunk.rows.start} to {chunk.rows.stop - 1} failed {len(chunk.causes)} times"
            self._end(chunk, "failed", RolloutError("\n  ".join([what, *chunk.causes])))
        self._happened()

    def _end(self, chunk: _Chunk, reason: str, error: Exception) -> None:
        chunk.ended = True
        self.ledger.drop(chunk.rows, reason)
        if chunk in self._waiting:
            self._waiting.remove(chunk)
        if not chunk.answers.done():
            chunk.answers.set_exception(error)

    # ---- health ------------------------------------------------------------------------------------------------

    def _suspect(self, place: _Place) -> bool:
        """Take a replica out of service, the caller holding the lock; False when somebody already did."""
        first = place.state == "ready"
        place.state = "recovering" if first else place.state
        return first

    def _recover(self, place: _Place, problem: Exception, *, asked: bool = False) -> None:
        """Find out what a suspect needs: nothing, weights, or a restart and weights.

        `asked`: the problem is that it did not answer how it is, so it is not asked again.
        """
        try:
            if isinstance(problem, _WrongVersionError | WeightTransferError):
                self._bring_weights(place)
            elif asked:
                raise problem
            else:
                place.replica.health(self.deadlines.health_s)
            state = "ready"
        except Exception as error:
            log.warning("%s is not well: %s", place.replica.name, error)
            state = self._restart(place)
        with self._change:
            place.state = state
            if all(p.state == "gone" for p in self._places):
                for chunk in list(self._waiting):
                    causes = "\n  ".join([self._all_gone(), *chunk.causes])
                    self._end(chunk, "failed", RolloutError(causes))
            self._happened()

    def _restart(self, place: _Place) -> str:
        while place.restarts < self.max_restarts and not self._closed:
            place.restarts += 1
            with self._change:
                self._counts["restarts"] += 1
                self._last_event_s = time.monotonic()
            try:
                place.replica.restart(self.deadlines.restart_s)
                self._bring_weights(place)
                return "ready"
            except Exception as error:
                log.warning("restart %d of %s failed: %s", place.restarts, place.replica.name, error)
        log.error("%s is given up after %d restarts", place.replica.name, place.restarts)
        return "gone"

    def _bring_weights(self, place: _Place) -> None:
        if self.on_restart is not None:
            self.on_restart(place.replica)

    def _all_gone(self) -> str:
        return f"all {len(self._places)} replicas are given up after {self.max_restarts} restarts each"

    def check_health(self) -> dict[str, Mapping[str, Any]]:
        """What every idle replica says of itself; one that does not answer is restarted, its entry has the error."""
        found: dict[str, Mapping[str, Any]] = {}
        for place in self._places:
            if place.state != "ready" or place.running:
                found[place.replica.name] = {"state": place.state, "rows": place.load}
                continue
            try:
                found[place.replica.name] = place.replica.health(self.deadlines.health_s)
            except Exception as error:
                found[place.replica.name] = {"error": str(error)}
                with self._change:
                    must_recover = self._suspect(place)
                if must_recover:
                    self._recover(place, error, asked=True)
        return found

    def drain(self, name: str, *, deadline_s: float) -> None:
        """Send the replica nothing more and wait until it has answered what it has."""
        place = self._place(name)
        with self._change:
            place.draining = True
            self._happened()
            if not self._change.wait_for(lambda: not place.running, timeout=deadline_s):
                raise DeadlineError(name, "drain", deadline_s, f"{place.load} rows are still running there")

    def admit(self, name: str) -> None:
        """Serve from a drained replica again."""
        with self._change:
            self._place(name).draining = False
            self._happened()

    def _place(self, name: str) -> _Place:
        return next(place for place in self._places if place.replica.name == name)

    def settle(self) -> None:
        """Wait until no replica is being restarted or given weights, so that the trainer's may change."""
        with self._change:
            longest_s = self.deadlines.health_s + self.deadlines.restart_s
            self._change.wait_for(lambda: all(p.state != "recovering" for p in self._places), timeout=longest_s)

    def weights_pushed(self, version: int) -> None:
        """From now on rows must be completed by this version (or one within `max_staleness` before it)."""
        with self._change:
            self._version = version

    def metrics(self) -> dict[str, float]:
        """Counts since the start: rows of the ledger, retries, restarts, refused versions, replicas that serve."""
        with self._change:
            counts = {
                name: self._counts[name] for name in ("failures", "retries", "restarts", "refused_versions", "aborted")
            }
            ready = sum(place.open for place in self._places)
            return {f"rollout/{k}": v for k, v in {**self.ledger.counts(), **counts, "replicas_ready": ready}.items()}

    def close(self) -> None:
        """Give up what waits, let a restart that is under way end, and end the lanes; the replicas stay as they are."""
        with self._change:
            self._closed = True
            unfinished = [*self._waiting, *(chunk for place in self._places for chunk in place.running)]
        self._give_up(unfinished, "closed")
        with self._change:
            self._happened()
        self.settle()

    def _happened(self) -> None:
        """Note that something changed; the caller holds the lock."""
        self._last_event_s = time.monotonic()
        self._change.notify_all()
