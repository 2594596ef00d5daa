"""A fleet whose replicas join and leave while it serves, as nodes join and leave the cluster."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlsys.fleet.fleet import RolloutFleet
from rlsys.fleet.requests import ReplicaState
from rlsys.protocol import DataProto
from rlsys.utils.errors import RolloutError

log = logging.getLogger(__name__)

POLL_S = 0.5
RETRY_S = 5.0


class ElasticFleet(RolloutFleet):
    """A fleet of the given replicas, of which at least `min_replicas` serve.

    `places` are the processes of a worker group, one for each replica (`GroupReplica`), which it starts on other nodes.
    A replica without a process, one that failed its health check and one whose node drains is started in the background
    where the cluster finds a place, however long that takes. It gets the weights of the last push by `on_restart`
    where these can be had, else takes part in the next push. Each push connects the replicas that it goes to by
    `connect(ranks)` if they have changed, and then asks a new one for its version before it serves.
    """

    recovers_before_push = False

    def __init__(
        self,
        replicas: Sequence[Any],
        *,
        places: Any,
        min_replicas: int,
        connect: Callable[[tuple[int, ...]], None],
        **options: Any,
    ) -> None:
        super().__init__(replicas, **options)
        self.places, self.min_replicas, self.connect = places, min_replicas, connect
        self._ranks = {replica.name: replica.rank for replica in replicas}
        self._connected: tuple[int, ...] = ()
        self._transfer = threading.RLock()
        """Held while weights are brought to replicas."""
        self.counts.update(joined=0, left=0)
        for entry in self._replicas:
            if self._ranks[entry.replica.name] not in places.present:
                self._set(entry, "away")

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Given responses scored by a replica that serves."""
        replica: Any = next(one.replica for one in self._replicas if one.state == "ready")
        return replica.compute_log_prob(data)

    @contextmanager
    def pushing(self, version: int) -> Iterator[None]:
        self.check_health()
        for entry in self._replicas:
            if entry.state == "ready" and self.places.is_draining(self._ranks[entry.replica.name]):
                with self._change:
                    self._give_up(entry, RolloutError("its node is drained"))
                    self.counts["left"] += 1
                    self._set(entry, "away")
        self._wait_for_replicas()
        with self._transfer:
            with super().pushing(version):
                taking = self._taking()
                if (ranks := tuple(self._ranks[entry.replica.name] for entry in taking)) != self._connected:
                    self._connected = ()
                    self.connect(ranks)
                    self._connected = ranks
                yield
            for entry in taking:
                if entry.state == "joining":
                    self._admit(entry)

    def _taking(self) -> list[ReplicaState]:
        """The replicas that weights are pushed to."""
        return [entry for entry in self._replicas if entry.state in ("ready", "joining")]

    def _wait_for_replicas(self) -> None:
        limit_s = self.deadlines.restart_s
        with self._change:
            if not self._change.wait_for(lambda: len(self._taking()) >= self.min_replicas, limit_s):
                away = ", ".join(one.replica.name for one in self._replicas if one not in self._taking())
                least = f"rollout.min_replicas={self.min_replicas}"
                raise RolloutError(f"{least}, and no node with room for {away} for {limit_s:g} s; see `ray status`")

    def _exchange(self, entry: ReplicaState) -> bool:
        if entry.state == "away":
            self._start(entry)
        return super()._exchange(entry)

    def _start(self, entry: ReplicaState) -> None:
        """Start a replica where the cluster finds a place."""
        replica, rank = entry.replica, self._ranks[entry.replica.name]
        try:
            self.places.vacate(rank)
            while not self.places.is_placed(rank):
                self._fail_if_all_are_down()
                if self._closes_within(POLL_S):
                    return
            log.info("starting %s", replica.name)
            replica.restart(self.deadlines.restart_s)
            self._bring_weights(entry)
        except Exception as error:
            log.warning("%s was not started: %s", replica.name, error)
            self._closes_within(RETRY_S)

    def _closes_within(self, seconds: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: self._closed, seconds)

    def _recover(self, entry: ReplicaState, problem: Exception, *, asked: bool = False) -> None:
        try:
            if asked:
                raise problem
            entry.replica.health(self.deadlines.health_s)
            self._bring_weights(entry)
        except Exception as error:
            log.warning("%s is lost: %s", entry.replica.name, error)
            self.counts["left"] += 1
            self._set(entry, "away")

    def _bring_weights(self, entry: ReplicaState) -> None:
        """Admit a replica with the weights of the last push, or let it wait for the next one."""
        with self._transfer:
            try:
                self.on_restart(entry.replica)
            except Exception as error:
                log.info("%s waits for the next push: %s", entry.replica.name, error)
                self._set(entry, "joining")
            else:
                self._admit(entry)

    def _admit(self, entry: ReplicaState) -> None:
        """Let a replica serve that says that it has the version that was pushed last."""
        try:
            version = entry.replica.health(self.deadlines.health_s)["version"]
            if version != self.version:
                raise RolloutError(f"its weights are of version {version} instead of {self.version}")
        except Exception as error:
            log.warning("%s is not admitted: %s", entry.replica.name, error)
            self._set(entry, "away")
        else:
            log.info("%s serves version %s", entry.replica.name, version)
            self.counts["joined"] += 1
            self._set(entry, "ready")
