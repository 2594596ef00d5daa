"""A fleet of rollout replicas on the driver: places requests, collects their tokens, and survives lost replicas.

A thread for each replica exchanges with it: it hands in what was placed there and takes the tokens that were sampled
since. A lost replica costs the tokens of a quarter second; its requests continue on another one. A replica that fails
has its health checked, is restarted if needed and gets the current weights before it serves again. Every request is
pending until it is answered or dropped, once.
"""

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial

from rlsys.fleet.placement import Placement
from rlsys.fleet.requests import FleetDeadlines, FleetRequest, Replica, ReplicaState, ReplicaStatus, RequestBatch
from rlsys.protocol import DataProto
from rlsys.rollout.batch import from_responses, to_requests
from rlsys.rollout.partial import BATCH_WAIT_S, EXCHANGE_WAIT_S, PartialResponse
from rlsys.types import Finish, ModelRequest, ModelResponse, ResponseDelta
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError, WrongVersionError

Work = Sequence[ModelRequest | PartialResponse]
"""Requests to complete, and responses to continue."""

log = logging.getLogger(__name__)
TURN_S = 0.00002  # how long a thread of the controller keeps the others waiting, which torch does at every operation
IN_USE, OUT = ("ready", "joining"), ("away", "gone")
"""States of the replicas that get weights at a push, and of those that have no process."""
POLL_S = 0.5
EXCHANGED_S = 1.0  # a replica that answered an exchange in these seconds is healthy
COUNTS = ("issued", "answered", "failures", "retries", "restarts", "refused_versions", "continued")


class RolloutFleet:
    """Completes requests on replicas; all methods may be called from any thread.

    `on_restart(replica)` must bring the current weights to a replica that was restarted or serves a wrong version;
    it runs before the replica serves again, which does so after the next push where it raises WeightTransferError.
    A request fails after `max_attempts` without a token in between, a replica after `max_restarts` without a push in
    between. Tokens must have the version that was served when their request was placed, or a newer one; versions are
    checked once weights were pushed. Without `chunk_rows` there are no fixed batches. The health of a replica is
    checked after `max_failures` failed requests in a row; `affinity` keeps equal prompts together.
    """

    recovers_before_push = True
    push: Callable[[], object] | None = None
    """Pushes the trainer's weights, where the controller offers it."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        chunk_rows: int | None,
        deadlines: FleetDeadlines,
        on_restart: Callable[[Replica], None] | None = None,
        max_attempts: int = 3,
        max_restarts: int = 3,
        max_in_flight: int | None = None,
        max_failures: int = 3,
        affinity: bool = False,
    ) -> None:
        if not replicas or chunk_rows == 0 or len({replica.name for replica in replicas}) < len(replicas):
            raise ValueError("a fleet needs replicas with different names and chunks of at least one row")
        self.chunk_rows, self.deadlines, self.on_restart = chunk_rows, deadlines, on_restart or (lambda replica: None)
        self.max_attempts, self.max_restarts, self.max_failures = max_attempts, max_restarts, max_failures
        self.version: int | None = None
        self._replicas = [ReplicaState(replica) for replica in replicas]
        self._placement = Placement(self._replicas, max_in_flight, affinity)
        self._ended: list[tuple[Future[ModelResponse], ModelResponse | Exception]] = []
        """Futures to resolve when the lock is free."""
        self._pending: dict[int, FleetRequest] = {}
        self.counts, self._ids = Counter(dict.fromkeys(COUNTS, 0)), itertools.count()
        self.pace: dict[int, tuple[float, ...]] = {}
        """Seconds, decode steps and tokens in all, by the bit length of the number of requests that a replica ran."""
        self._closed, self._is_pushing, self._down_from_s = False, False, 0.0
        self._change = threading.Condition()
        sys.setswitchinterval(TURN_S)
        self._pumps = [in_daemon_thread(partial(self._pump, e), name=f"fleet-{e.replica.name}") for e in self._replicas]

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, work: Work, *, together: bool = False) -> list[Future[ModelResponse]]:
        """Complete requests, or continue partial responses; a future that is cancelled gives its request up.

        Futures raise ValueError for a request that no engine can serve, and RolloutError with replicas and causes for
        one that failed. With `together` the work is cut into fixed batches of `chunk_rows`, each decoded alone by one
        replica and repeated as a whole if that fails, so that responses do not depend on replicas or failures.
        """
        with self._change:
            if self._closed or all(entry.state == "gone" for entry in self._replicas):
                raise RolloutError("the fleet is closed" if self._closed else self._all_gone())
            partials = [PartialResponse(item) if isinstance(item, ModelRequest) else item.copy() for item in work]
            fixed_rows = self.chunk_rows if together else None
            batch_rows, first_number = fixed_rows or 1, self.counts["issued"]
            batches = [RequestBatch(fixed=fixed_rows is not None) for _ in range(0, len(partials), batch_rows)]
            requests = [
                FleetRequest(first_number + row, response, len(response.tokens), batches[row // batch_rows])
                for row, response in enumerate(partials)
            ]
            self._placement.waiting += batches
            self.counts["issued"] += len(requests)
            self._pending |= {request.number: request for request in requests}
            self._place()
        for request in requests:
            request.answer.add_done_callback(lambda answer, request=request: self._on_done(request))  # type: ignore[misc]
        return [request.answer for request in requests]

    def generate(
        self, requests: Sequence[ModelRequest], *, meanwhile: Callable[[], object] = lambda: None
    ) -> list[ModelResponse]:
        """Complete all requests together, in order; the first failure is raised and ends the others."""
        answers = self.submit(requests, together=True)
        try:
            while (waited := wait(answers, POLL_S, FIRST_EXCEPTION)).not_done:
                for answer in waited.done:
                    answer.result()
                meanwhile()
            return [answer.result() for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """As `rlsys.rollout.batch.generate_sequences` on all rows of a batch; for the thread that pushes weights."""
        return from_responses(batch, self.generate(to_requests(batch), meanwhile=self.push_if_stranded))

    async def sample(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt; requests of one session go to the same replica while it serves."""
        return await asyncio.wrap_future(self.submit([request])[0])

    def unfinished(self) -> list[PartialResponse]:
        """Copies of all requests that are not answered, with their tokens so far; `submit` continues them."""
        with self._change:
            return [request.partial.copy() for request in self._pending.values()]

    def _place(self) -> None:
        """Place what waits, and wake the threads of the replicas; the caller holds the lock."""
        self._placement.place()
        self._change.notify_all()

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def _pump(self, entry: ReplicaState) -> None:
        try:
            while self._exchange(entry):
                pass
        except BaseException as error:
            log.exception("the thread of %s failed", entry.replica.name)
            self._end_all(RolloutError(f"the fleet's thread of {entry.replica.name} failed: {error!r}"))

    def _exchange(self, entry: ReplicaState) -> bool:
        """Wait for work and exchange with the replica once; False when the fleet is closed or the replica is gone.

        Between two exchanges tokens should gather. That pause is made here, where a push does not wait for it, and not
        in the engine; but for the end of a fixed batch a caller waits, so there the engine waits, and answers at once
        when it has ended.
        """
        while entry.state == "joining" and not self._closed:
            self._fail_if_all_are_down()
            with self._change:
                self._change.wait_for(lambda: self._closed or entry.state != "joining", POLL_S)
        with self._change:
            entry.idle_from_s = None if entry.load else time.monotonic()
            self._change.wait_for(lambda: self._closed or entry.state in OUT or self._has_work(entry))
            if entry.idle_from_s is not None:
                entry.heard_s = time.monotonic()  # its silence counts from its first request on
            entry.idle_s, entry.idle_from_s = entry.idle_until(time.monotonic()), None
            if self._closed or entry.state in OUT:
                return not self._closed and entry.state != "gone"
            new, cancel = self._hand_in(entry), entry.cancelled
            entry.cancelled, entry.is_exchanging = set(), True
            are_fixed = [request.batch.fixed for request in entry.running.values()]
            # where all are of a fixed batch no other request's tokens are wanted earlier
            wait_s = 0.0 if not any(are_fixed) else BATCH_WAIT_S if all(are_fixed) else EXCHANGE_WAIT_S
        problem, deltas = None, []
        try:
            deltas = entry.replica.exchange(new, cancel=cancel, wait_s=wait_s, deadline_s=self.deadlines.exchange_s)
            entry.exchanged_s = time.monotonic()
        except Exception as error:
            problem = error
        with self._change:
            entry.is_exchanging = False
            problem = problem or self._take(entry, deltas)
            self._measure(entry, deltas)
            if problem is not None:
                entry.cancelled |= cancel
                if entry.state == "ready":
                    self._give_up(entry, problem)
                else:  # a health check has given it up meanwhile, and recovers it
                    problem = None
            self._place()
        self._resolve_futures()
        if problem is not None:
            self._recover(entry, problem)
        elif entry.load and not (any(are_fixed) and deltas):
            with self._change:
                self._change.wait_for(lambda: self._closed or entry.placed or entry.cancelled, EXCHANGE_WAIT_S / 2)
        return True

    def _measure(self, entry: ReplicaState, deltas: Sequence[ResponseDelta]) -> None:
        """Add what was measured since the replica's last report to the `pace`."""
        if (report := entry.report(deltas)) is not None:
            num_requests, *new = report
            before = self.pace.get(num_requests.bit_length(), (0.0, 0, 0))
            self.pace[num_requests.bit_length()] = tuple(a + b for a, b in zip(before, new, strict=True))

    def _has_work(self, entry: ReplicaState) -> bool:
        return entry.state == "ready" and not self._is_pushing and bool(entry.load or entry.cancelled)

    def _hand_in(self, entry: ReplicaState) -> list[ModelRequest]:
        """What was placed on the replica, under ids of its own; the caller holds the lock."""
        placed, entry.placed, new = entry.placed, [], list[ModelRequest]()
        for request in placed:
            rid = f"{request.partial.request.rid}#{next(self._ids)}"
            entry.running[rid] = request
            request.oldest_version = self.version
            new.append(request.partial.rest(rid))
        return new

    def _take(self, entry: ReplicaState, deltas: Sequence[ResponseDelta]) -> Exception | None:
        """Add what was sampled to the requests; returns what is wrong with the replica."""
        for delta in deltas:
            if (request := entry.running.get(delta.rid)) is None:
                continue
            if delta.refused:
                del entry.running[delta.rid]
                self._end(request, ValueError(f"request {request.partial.request.rid}: {delta.error}"))
            elif delta.error:
                entry.failures += 1
                self._retry(entry, request.batch, RolloutError(delta.error))
                if entry.failures >= self.max_failures:
                    return RolloutError(f"{entry.failures} requests failed, the last with {delta.error}")
            elif problem := request.wrong_version(delta, self.version):
                return problem
            else:
                self._add(entry, request, delta)
        if entry.running and time.monotonic() - entry.heard_s > self.deadlines.generate_s:
            hint = f"{len(entry.running)} requests got no token"
            return DeadlineError(entry.replica.name, "generate", self.deadlines.generate_s, hint)
        return None

    def _add(self, entry: ReplicaState, request: FleetRequest, delta: ResponseDelta) -> None:
        request.partial.add(delta)
        if delta.tokens:
            entry.heard_s, entry.failures = time.monotonic(), 0
            if not request.batch.fixed:
                request.batch.causes.clear()
                request.batch.failed_on.clear()
        if delta.finish is not None:
            del entry.running[delta.rid]
        if request.partial.finish is not None:
            self._end(request, None)
        elif delta.finish is Finish.ABORT:
            self.counts["continued"] += 1
            entry.placed.append(request)

    def _end(self, request: FleetRequest, error: Exception | None) -> None:
        """Count a request as answered or dropped, once; `_resolve_futures` then gives its future the result."""
        if self._pending.pop(request.number, None):
            self.counts["answered"] += error is None
            self._ended.append((request.answer, error or request.partial.response()))

    def _resolve_futures(self) -> None:
        """Resolve the futures of requests that have ended; callbacks run outside of the lock."""
        with self._change:
            ended, self._ended = self._ended, []
        for answer, result in ended:
            if not answer.set_running_or_notify_cancel():
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    def _on_done(self, request: FleetRequest) -> None:
        """Give a request up whose future was cancelled."""
        with self._change:
            if request.answer.cancelled() and self._pending.pop(request.number, None):
                for entry in self._replicas:
                    self._take_back(entry, [request])
                self._placement.remove(request)
                self._place()

    def _take_back(self, entry: ReplicaState, requests: Sequence[FleetRequest]) -> None:
        """Have a replica forget these requests."""
        entry.placed = [request for request in entry.placed if request not in requests]
        gone = {rid for rid, request in entry.running.items() if request in requests}
        entry.cancelled |= gone
        for rid in gone:
            del entry.running[rid]

    # ---- failures ----------------------------------------------------------------------------------------------

    def _give_up(self, entry: ReplicaState, problem: Exception) -> None:
        """Take a replica out of service; its requests are queued for another one. The caller holds the lock."""
        log.warning("%s failed with %d requests: %s", entry.replica.name, entry.load, problem)
        entry.state, entry.failures = "recovering", 0
        if not any(p.state == "ready" for p in self._replicas):
            self._down_from_s = time.monotonic()
        for batch in dict.fromkeys(request.batch for request in entry.held):
            self._retry(entry, batch, problem)

    def _retry(self, entry: ReplicaState, batch: RequestBatch, problem: Exception) -> None:
        """Queue a failed batch for another replica, or fail it after too many attempts."""
        self.counts["refused_versions" if isinstance(problem, WrongVersionError) else "failures"] += 1
        self._take_back(entry, batch.requests)
        batch.causes.append(f"{entry.replica.name}: {type(problem).__name__}: {problem}")
        batch.failed_on.add(entry.replica.name)
        if batch.fixed:
            for request in batch.requests:
                request.partial.rewind(request.num_given)
        if len(batch.causes) < self.max_attempts:
            self.counts["retries"] += 1
            self._placement.put_back(batch)
        else:
            first, num = batch.requests[0].partial.request.rid, len(batch.requests)
            what = f"request {first}{f' and {num - 1} more' if num > 1 else ''} failed {len(batch.causes)} times"
            self._fail(batch, what)

    def _fail(self, batch: RequestBatch, what: str) -> None:
        for request in batch.requests:
            self._end(request, RolloutError("\n  ".join([what, *batch.causes])))

    def _recover(self, entry: ReplicaState, problem: Exception, *, is_unhealthy: bool = False) -> None:
        """Bring a replica that was given up back: one that is healthy as it is, else by weights or a restart.

        `is_unhealthy`: the problem is that its health check failed, so it is not repeated.
        """
        try:
            if isinstance(problem, WrongVersionError | WeightTransferError):
                self.on_restart(entry.replica)
            elif is_unhealthy:
                raise problem
            else:
                entry.replica.health(self.deadlines.health_s)
            state = "ready"
        except Exception as error:
            log.warning("replica %s failed its health check: %s", entry.replica.name, str(error) or repr(error))
            state = self._restart(entry)
        self._set_state(entry, state)
        self._fail_if_all_are_down()

    def _set_state(self, entry: ReplicaState, state: ReplicaStatus) -> None:
        with self._change:
            entry.state = state
            self._place()
        self._resolve_futures()

    def _restart(self, entry: ReplicaState) -> ReplicaStatus:
        while entry.restarts < self.max_restarts and not self._closed:
            with self._change:
                entry.restarts, entry.cancelled = entry.restarts + 1, set()
                self.counts["restarts"] += 1
            try:
                entry.replica.restart(self.deadlines.restart_s)
                self.on_restart(entry.replica)
                return "ready"
            except Exception as error:
                log.warning("restart %d of %s failed: %s", entry.restarts, entry.replica.name, error)
                if isinstance(error, WeightTransferError) and (self._is_pushing or self.recovers_before_push):
                    return "ready" if self._is_pushing else "joining"  # it gets the weights of this or the next push
            self._fail_if_all_are_down()
        log.error("giving up on replica %s after %d restarts", entry.replica.name, entry.restarts)
        return "gone"

    def _fail_if_all_are_down(self) -> None:
        """Fail the waiting requests when all replicas are gone, or none has been ready for `generate_s`.

        Where all are away, so that the next push brings none back either, for `restart_s`.
        """
        with self._change:
            states = {entry.state for entry in self._replicas}
            limit_s = self.deadlines.restart_s if states == {"away"} else self.deadlines.generate_s
            is_late = "ready" not in states and time.monotonic() - self._down_from_s > limit_s
            if states == {"gone"} or is_late:
                what = self._all_gone() if states == {"gone"} else f"no replica was ready for {limit_s:g} s"
                for batch in self._placement.waiting:
                    self._fail(batch, what)
                self._placement.waiting = []
        self._resolve_futures()

    def _all_gone(self) -> str:
        how = f"after {self.max_restarts} restarts each" if self.max_restarts else "and restarts are off"
        return f"all {len(self._replicas)} rollout replicas failed {how}"

    def check_health(self) -> None:
        """Check the health of replicas in use that have not answered just now; one that fails is restarted."""
        for entry in self._replicas:
            try:
                if entry.state in IN_USE and time.monotonic() - entry.exchanged_s > EXCHANGED_S:
                    entry.replica.health(self.deadlines.health_s)
            except Exception as error:
                with self._change:
                    if must_recover := entry.state in IN_USE:
                        self._give_up(entry, error)
                if must_recover:
                    self._recover(entry, error, is_unhealthy=True)

    # ---- weights -----------------------------------------------------------------------------------------------

    @contextmanager
    def pushing(self, version: int) -> Iterator[None]:
        """Push weights inside: no replica is asked for anything, engines decode on until they are updated.

        Afterwards tokens of requests placed from then on must be of this version or a newer one.
        """
        self._is_pushing = True
        try:
            self.settle()
            if self.recovers_before_push and self.max_restarts and self.version is not None:
                self.check_health()
            yield
            self.version = version
            for entry in [one for one in self._replicas if one.state == "joining" and self.recovers_before_push]:
                self._set_state(entry, "ready")
        finally:
            with self._change:
                self._is_pushing = False
                for entry in self._replicas:  # one may have been lost since its last exchange: check its health again
                    entry.heard_s, entry.exchanged_s, entry.restarts = time.monotonic(), 0.0, 0
                self._change.notify_all()

    def push_if_stranded(self) -> None:
        """Push where no replica can serve otherwise; what waits for answers calls it, in the thread that pushes."""
        states = {entry.state for entry in self._replicas}
        if self.push is not None and "joining" in states and "ready" not in states and self._pending:
            log.info("no replica serves: the weights are pushed to those that have joined")
            self.push()

    def settle(self) -> None:
        """Wait until no replica is being recovered or, during a push, asked for anything."""

        def is_settled(entry: ReplicaState) -> bool:
            is_recovering = entry.state == "recovering" and self.recovers_before_push
            return not is_recovering and not (self._is_pushing and entry.is_exchanging)

        limit_s = self.deadlines.exchange_s + self.deadlines.health_s + self.deadlines.restart_s
        with self._change:
            if not self._change.wait_for(lambda: all(map(is_settled, self._replicas)), timeout=limit_s):
                late = ", ".join(entry.replica.name for entry in self._replicas if not is_settled(entry))
                raise DeadlineError(late, "settle", limit_s, "it is being restarted, or does not answer")

    # ---- life --------------------------------------------------------------------------------------------------

    def idle_s(self) -> float:
        """Seconds without work until now, summed over replicas."""
        return sum(entry.idle_until(time.monotonic()) for entry in self._replicas)

    def metrics(self) -> dict[str, float]:
        """Requests, retries, restarts and refused versions since the start; serving replicas."""
        with self._change:
            pending, ready = len(self._pending), sum(entry.state == "ready" for entry in self._replicas)
            dropped = self.counts["issued"] - self.counts["answered"] - pending
            counts = {**self.counts, "dropped": dropped, "pending": pending, "replicas_ready": ready}
            return {f"rollout/{name}": count for name, count in counts.items()}

    def close(self) -> None:
        """Give up unfinished requests, wait for a running restart and end the threads; the replicas are not closed."""
        self._closed = True
        self._end_all(RolloutError("the fleet was closed"))
        self.settle()

    def _end_all(self, error: Exception) -> None:
        with self._change:
            for request in [*self._pending.values()]:
                self._end(request, error)
            self._change.notify_all()
        self._resolve_futures()
