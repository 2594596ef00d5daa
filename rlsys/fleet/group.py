"""A worker group of rollout ranks as the replicas of a fleet."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.config.schema.rollout import GenerationConfig, RolloutConfig
from rlsys.config.schema.trainer import GradingDeadlinesConfig
from rlsys.fleet.elastic import ElasticFleet
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.protocol import DataProto
from rlsys.types import ModelRequest, ResponseDelta
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.executors.base import RankFuture
from rlsys.weights.sharding_manager import ShardingManager

MAX_RESTARTS = 3


@dataclass(frozen=True)
class GroupReplica:
    """The `size` ranks of a rollout worker group that serve one copy of the model; the first rank answers for all.

    With several copies of the attention the first of each one's `attention_size` ranks answers for it.
    """

    group: Any
    rank: int
    size: int = 1
    attention_size: int = 1

    @property
    def name(self) -> str:
        return f"rollout {self.rank}"

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        end_s = time.monotonic() + deadline_s
        pending = [
            self.group.execute_rank_async(rank, "exchange", list(new), wait_s, list(cancel))
            for rank in range(self.rank, self.rank + self.size)
        ]
        results = [result.get(max(0.01, end_s - time.monotonic())) for result in pending]
        return [delta for deltas in results[:: self.attention_size] for delta in deltas]

    def health(self, deadline_s: float) -> Mapping[str, object]:
        return self.group.execute_rank(self.rank, "health", deadline_s=deadline_s)

    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self.group.execute_rank(self.rank, "compute_log_prob", data)

    def restart(self, deadline_s: float) -> None:
        self.group.restart_rank(self.rank, deadline_s)
        self.group.execute_rank(self.rank, "init_model", deadline_s=deadline_s)


@dataclass(frozen=True)
class RanksOfGroup:
    """Some ranks of a worker group, numbered from 0, as a sharding manager calls them."""

    group: Any
    ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def execute_rank_async(self, rank: int, method: str, *args: object) -> RankFuture:
        return self.group.execute_rank_async(self.ranks[rank], method, *args)

    def execute_all_async(self, method: str, *args: object) -> list[RankFuture]:
        return [self.execute_rank_async(rank, method, *args) for rank in range(self.world_size)]


def group_fleet(
    group: Any,
    rollout: GenerationConfig,
    deadlines: GradingDeadlinesConfig,
    *,
    num_rows: int,
    restartable: bool,
    manager: ShardingManager | None = None,
) -> RolloutFleet:
    """A fleet over the ranks of a rollout worker group, for calls of about `num_rows` rows.

    A replica of one rank that dies is restarted if `restartable`, and `manager` brings its weights back. With
    rollout.min_replicas some ranks may have no process yet, and the manager is connected to those that serve.
    """
    size, attention_size = rollout.replica_size, rollout.attention_size
    replicas = [GroupReplica(group, rank, size, attention_size) for rank in range(0, group.world_size, size)]

    def restore(replica: GroupReplica) -> None:
        assert manager is not None
        ranks = getattr(manager.destination, "ranks", range(group.world_size))
        if replica.rank not in ranks:
            raise WeightTransferError(f"{replica.name} took no part in the last push")
        manager.restore(ranks.index(replica.rank))

    options: dict[str, Any] = {
        "chunk_rows": min(-(-num_rows // len(replicas)), rollout.max_replica_seqs),
        "deadlines": FleetDeadlines(generate_s=deadlines.generate_s, restart_s=deadlines.start_s),
        "on_restart": None if manager is None else restore,
    }
    if manager is not None and isinstance(rollout, RolloutConfig) and rollout.min_replicas is not None:
        options["connect"] = lambda ranks: manager.connect(RanksOfGroup(group, ranks))
        options["copy"] = lambda *pair: manager.copy(*(RanksOfGroup(group, (replica.rank,)) for replica in pair))
        return ElasticFleet(replicas, places=group.backend, min_replicas=rollout.min_replicas, **options)
    return RolloutFleet(replicas, max_restarts=MAX_RESTARTS if restartable and size == 1 else 0, **options)
