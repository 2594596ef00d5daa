"""A worker group of rollout ranks as the replicas of a fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.config.schema.trainer import GradingDeadlinesConfig
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.types import ModelRequest, ResponseDelta

MAX_RESTARTS = 3


@dataclass(frozen=True)
class GroupReplica:
    """The `size` ranks of a rollout worker group that serve one copy of the model; the first rank answers for all."""

    group: Any
    rank: int
    size: int = 1

    @property
    def name(self) -> str:
        return f"rollout {self.rank}"

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        end_s = time.monotonic() + deadline_s
        pending = [
            self.group.execute_rank_async(rank, "exchange", list(new), wait_s, list(cancel), stage="exchange")
            for rank in range(self.rank, self.rank + self.size)
        ]
        first, *_ = [result.get(max(0.01, end_s - time.monotonic())) for result in pending]
        return first

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.group.execute_rank(self.rank, "health", deadline_s=deadline_s)

    def restart(self, deadline_s: float) -> None:
        self.group.restart_rank(self.rank, deadline_s)
        self.group.execute_rank(self.rank, "init_model", deadline_s=deadline_s)


def group_fleet(
    group: Any,
    rollout: GenerationConfig,
    deadlines: GradingDeadlinesConfig,
    *,
    num_rows: int,
    restartable: bool,
    restore: Callable[[int], None] | None = None,
) -> RolloutFleet:
    """A fleet over the ranks of a rollout worker group, for calls of about `num_rows` rows.

    A replica of one rank that dies is restarted if `restartable`, and `restore(rank)` brings its weights back.
    """
    size = rollout.tensor_model_parallel_size
    replicas = [GroupReplica(group, rank, size) for rank in range(0, group.world_size, size)]
    ranks = {replica.name: replica.rank for replica in replicas}
    return RolloutFleet(
        replicas,
        chunk_rows=min(-(-num_rows // len(replicas)), rollout.max_num_seqs),
        deadlines=FleetDeadlines(generate_s=deadlines.generate_s, restart_s=deadlines.start_s),
        on_restart=None if restore is None else lambda replica: restore(ranks[replica.name]),
        max_restarts=MAX_RESTARTS if restartable and size == 1 else 0,
    )
