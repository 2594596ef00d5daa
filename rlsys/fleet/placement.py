"""Which replica gets which waiting batch of requests."""

from bisect import insort
from collections.abc import Sequence

from rlsys.fleet.requests import FleetRequest, ReplicaState, RequestBatch

MAX_SESSIONS = 100_000
"""Sessions whose replica is remembered; the oldest are forgotten first."""


class Placement:
    """The batches that wait for a replica, and the replica that serves each session; callers hold the fleet's lock.

    A replica has at most `max_in_flight` requests. With `affinity` the requests of equal prompts are one session.
    """

    def __init__(self, replicas: Sequence[ReplicaState], max_in_flight: int | None, affinity: bool) -> None:
        self._replicas, self._max_in_flight, self._affinity = replicas, max_in_flight, affinity
        self.waiting: list[RequestBatch] = []
        self._replica_of_session: dict[str, ReplicaState] = {}

    def put_back(self, batch: RequestBatch) -> None:
        """Let a batch that failed wait again, in the place that it had among the others."""
        insort(self.waiting, batch, key=lambda waiting: waiting.requests[0].number)

    def remove(self, request: FleetRequest) -> None:
        """Drop a request, if it waits."""
        if request.batch in self.waiting:
            request.batch.requests.remove(request)
            self.waiting = [batch for batch in self.waiting if batch.requests]

    def place(self) -> None:
        """Give waiting batches, in their order, to the replicas that should serve them; the others keep waiting."""
        left = []
        for at, batch in enumerate(self.waiting):
            candidates = [entry for entry in self._replicas if self._has_room(entry, batch)]
            if not candidates and not batch.fixed:  # then there is none for a later batch either
                left += self.waiting[at:]
                break
            if (chosen := self._choose(batch, candidates)) is None:
                left.append(batch)
                continue
            chosen.placed += batch.requests
            self._replica_of_session |= dict.fromkeys(filter(None, map(self._session, batch.requests)), chosen)
        while len(self._replica_of_session) > MAX_SESSIONS:
            del self._replica_of_session[next(iter(self._replica_of_session))]
        self.waiting = left

    def _has_room(self, entry: ReplicaState, batch: RequestBatch) -> bool:
        """Whether a replica may get a batch now; it has one fixed batch at a time."""
        is_full = self._max_in_flight is not None and entry.load >= self._max_in_flight
        return entry.state == "ready" and not is_full and not (batch.fixed and any(r.batch.fixed for r in entry.held))

    def _choose(self, batch: RequestBatch, candidates: Sequence[ReplicaState]) -> ReplicaState | None:
        """The least loaded candidate; None if the batch should wait for a replica that has no room now.

        A session stays on its replica, and a batch that failed goes to a replica that it has not failed on, if one is
        ready.
        """
        ready = [entry for entry in self._replicas if entry.state == "ready"]
        untried = {entry.replica.name for entry in ready} - batch.failed_on
        candidates = [entry for entry in candidates if entry.replica.name in untried or not untried]
        owner = self._replica_of_session.get(self._session(batch.requests[0]))
        if owner in ready and owner.replica.name not in batch.failed_on:
            return owner if owner in candidates else None
        return min(candidates, key=lambda entry: entry.load, default=None)

    def _session(self, request: FleetRequest) -> str:
        """The session that a request belongs to, "" for none."""
        asked = request.partial.request
        return asked.session or (f"prompt {hash(asked.input_ids)}" if self._affinity else "")
