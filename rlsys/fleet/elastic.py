"""A fleet whose replicas join and leave while it serves, as nodes join and leave the cluster."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from rlsys.fleet.fleet import IN_USE, POLL_S, RolloutFleet
from rlsys.fleet.requests import Replica, ReplicaState, ReplicaStatus
from rlsys.protocol import DataProto
from rlsys.utils.errors import DeadlineError, RolloutError

log = logging.getLogger(__name__)
RETRY_S = 5.0


class ElasticFleet(RolloutFleet):
    """A fleet of the given replicas, of which at least `min_replicas` serve.

    `places` are the processes of a worker group, one for each replica (`GroupReplica`), which it starts on other nodes.
    A replica without a process, one that failed its health check and one whose node drains is started in the background
    where the cluster finds a place, however long that takes. It gets the weights of the last push by `on_restart`
    where these can be had, else by `copy(peer, newcomer)` from a replica that serves, else takes part in the next push,
    which is `push` if none serves while answers are waited for. Before it serves it is asked for its version. Each push
    connects the replicas that it goes to by `connect(ranks)` if they have changed.
    """

    recovers_before_push = False

    def __init__(
        self,
        replicas: Sequence[Any],
        *,
        places: Any,
        min_replicas: int,
        connect: Callable[[tuple[int, ...]], None],
        copy: Callable[..., None],
        **options: Any,
    ) -> None:
        super().__init__(replicas, **options)
        self.places, self.min_replicas, self.connect, self.copy = places, min_replicas, connect, copy
        self._ranks = {replica.name: replica.rank for replica in replicas}
        self._connected: tuple[int, ...] = ()
        self._transfer = threading.RLock()
        """Held while weights are brought to replicas."""
        self._placed_s: dict[str, float] = {}
        """When a node was found for each replica that has not served since."""
        self.counts.update(joined=0, join_s=0, left=0, waited_for_push=0)
        for entry in self._replicas:
            if self._ranks[entry.replica.name] not in places.present:
                self._set_state(entry, "away")

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Given responses scored by a replica that serves; DeadlineError if none does within `health_s`."""
        with self._change:
            if not (serving := self._change.wait_for(lambda: self._in_state("ready"), self.deadlines.health_s)):
                states = ", ".join(f"{entry.replica.name} ({entry.state})" for entry in self._replicas)
                raise DeadlineError(states, "compute_log_prob", self.deadlines.health_s, "no replica serves")
        return cast(Any, serving[0].replica).compute_log_prob(data)

    @contextmanager
    def pushing(self, version: int) -> Iterator[None]:
        self.check_health()
        for entry in self._replicas:
            if entry.state == "ready" and self.places.is_draining(self._ranks[entry.replica.name]):
                with self._change:
                    self._give_up(entry, RolloutError("its node is drained"))
                    self.counts["left"] += 1
                self._set_state(entry, "away")
        with ExitStack() as until_served:
            with super().pushing(version):
                self._wait_for_replicas()  # one may have been lost in its last exchange
                until_served.enter_context(self._transfer)
                receivers = self._in_state(*IN_USE)
                if (ranks := tuple(self._ranks[entry.replica.name] for entry in receivers)) != self._connected:
                    self._connected = ()
                    self.connect(ranks)
                    self._connected = ranks
                yield
            for entry in receivers:
                if entry.state == "joining":
                    self._bring_weights(entry)

    def _in_state(self, *states: ReplicaStatus) -> list[ReplicaState]:
        return [entry for entry in self._replicas if entry.state in states]

    def _wait_for_replicas(self) -> None:
        limit_s = self.deadlines.restart_s
        with self._change:
            if not self._change.wait_for(lambda: len(self._in_state(*IN_USE)) >= self.min_replicas, limit_s):
                away = ", ".join(entry.replica.name for entry in self._replicas if entry not in self._in_state(*IN_USE))
                least = f"rollout.min_replicas={self.min_replicas}"
                raise RolloutError(f"{least}, and no node with room for {away} for {limit_s:g} s; see `ray status`")

    def _exchange(self, entry: ReplicaState) -> bool:
        if entry.state == "away" and not self._closed:
            self._start(entry)
        return super()._exchange(entry)

    def _start(self, entry: ReplicaState) -> None:
        """Start a replica where the cluster finds a place."""
        rank = self._ranks[entry.replica.name]
        entry.cancelled = set()
        try:
            place = self.places.vacate(rank)
            while not self.places.is_placed(place, POLL_S):
                self._fail_if_all_are_down()
                if self._closed:
                    return
            self._placed_s[entry.replica.name] = time.monotonic()
            log.info("starting %s", entry.replica.name)
            entry.replica.restart(self.deadlines.restart_s)
            self._bring_weights(entry)
        except Exception as error:
            log.warning("%s was not started: %s", entry.replica.name, error)
            with self._change:
                self._change.wait_for(lambda: self._closed, RETRY_S)

    def _recover(self, entry: ReplicaState, problem: Exception, *, is_unhealthy: bool = False) -> None:
        try:
            if is_unhealthy:
                raise problem
            entry.replica.health(self.deadlines.health_s)
            self._bring_weights(entry)
        except Exception as error:
            log.warning("%s is lost: %s", entry.replica.name, error)
            self.counts["left"] += entry.replica.name not in self._placed_s
            self._set_state(entry, "away")

    def _bring_weights(self, entry: ReplicaState) -> None:
        """Let a replica serve that has or gets the weights of the last push, or let it wait for the next one."""
        reasons = list[str]()
        with self._transfer:
            for bring in (None, self.on_restart, self._copy_from_peer):
                try:
                    if bring is not None:
                        bring(entry.replica)
                    self._check_version(entry.replica)
                except Exception as error:
                    reasons.append(str(error))
                else:
                    return self._serve(entry)
            log.info("%s waits for the next push: %s", entry.replica.name, "; ".join(reasons))
            self.counts["waited_for_push"] += self.version is not None
            self._connected = ()  # a new process has joined no transfer
            self._set_state(entry, "joining")

    def _copy_from_peer(self, newcomer: Replica) -> None:
        """Have the least loaded replica send its weights, between two exchanges."""
        if not (serving := self._in_state("ready")):
            raise RolloutError("no replica serves")
        peer = min(serving, key=lambda entry: entry.load).replica
        self._check_version(peer)
        self._connected = ()
        self.copy(peer, newcomer)

    def _check_version(self, replica: Replica) -> None:
        """RolloutError unless a replica has the weights that were pushed last, whole."""
        health = replica.health(self.deadlines.health_s)
        if health["quarantined"] or health["version"] != self.version:
            raise RolloutError(f"its weights are not whole or not of version {self.version}: it reports {health}")

    def _serve(self, entry: ReplicaState) -> None:
        if (placed_s := self._placed_s.pop(entry.replica.name, None)) is not None:
            join_s = time.monotonic() - placed_s
            log.info("%s serves version %s, %.1f s after its start", entry.replica.name, self.version, join_s)
            self.counts.update(joined=1, join_s=round(join_s))
        self._set_state(entry, "ready")

    def close(self) -> None:
        """As RolloutFleet's; replicas that are starting are ended first, since the caller ends their processes next."""
        super().close()
        end_s = time.monotonic() + self.deadlines.health_s
        threads = zip(self._pumps, self._replicas, strict=True)
        starting = {thread: entry.replica.name for thread, entry in threads if entry.state == "away"}
        while time.monotonic() < end_s and wait(starting, POLL_S).not_done:
            for name in starting.values():
                self.places.kill(self._ranks[name])
