"""The rollout group as a fleet of replicas, and the way of the actor's weights into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlsys.config import EvalConfig, PPOConfig
from rlsys.protocol import DataProto
from rlsys.rollout.fleet import FleetDeadlines, RolloutFleet
from rlsys.types import TransferReport
from rlsys.utils.errors import ConfigError
from rlsys.weights.sharding_manager import FSDPHFShardingManager, ShardingManager
from trainer.answers import Generate
from trainer.groups import WorkerGroups


@dataclass(frozen=True)
class GroupReplica:
    """One rank of the rollout group as the fleet sees it."""

    group: Any
    rank: int

    @property
    def name(self) -> str:
        return f"rollout {self.rank}"

    def generate(self, work: Any, deadline_s: float) -> Any:
        return self.group.execute_rank(
            self.rank, "generate_sequences", work, deadline_s=deadline_s, stage="generate_sequences"
        )

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.group.execute_rank(self.rank, "health", deadline_s=deadline_s)

    def restart(self, deadline_s: float) -> None:
        self.group.restart_rank(self.rank, deadline_s)
        self.group.execute_rank(self.rank, "init_model", deadline_s=deadline_s)


def rollout_fleet(
    group: Any,
    cfg: PPOConfig | EvalConfig,
    *,
    rows: int,
    restartable: bool,
    transfer: ShardingManager | None = None,
    max_staleness: int = 0,
) -> RolloutFleet:
    """The ranks of a rollout group as replicas, for calls of about `rows` rows.

    One that dies is restarted, unless the actor lived in its process too.
    """
    share = -(-rows // group.world_size)
    return RolloutFleet(
        [GroupReplica(group, rank) for rank in range(group.world_size)],
        chunk_rows=min(share, cfg.actor_rollout_ref.rollout.max_num_seqs),
        deadlines=FleetDeadlines(generate_s=cfg.trainer.deadlines.generate_s, restart_s=cfg.trainer.deadlines.start_s),
        on_restart=None if transfer is None else lambda replica: _restore(transfer, replica),
        max_restarts=3 if restartable else 0,
        max_staleness=max_staleness,
    )


def _restore(transfer: ShardingManager, replica: Any) -> None:
    transfer.restore(replica.rank)


def push_by(transfer: ShardingManager, fleet: RolloutFleet, *, validate: bool) -> Callable[[int], TransferReport]:
    """Push weights, prove on request that they arrived, and from then on refuse answers of older ones."""

    def push(version: int) -> TransferReport:
        fleet.settle()
        if fleet.max_restarts and transfer.version is not None:
            fleet.check_health()
        report = transfer.push(version)
        if validate:
            transfer.validate()
        fleet.weights_pushed(version)
        return report

    return push


def generate_by(fleet: RolloutFleet) -> Generate:
    """Rows in, completed rows out, with the counts of what this call took."""

    def generate(rows: DataProto) -> tuple[DataProto, dict[str, float]]:
        before = {**fleet.metrics(), "rollout/replicas_ready": 0.0}
        prompts = rows.select(batch_keys=["prompts", "attention_mask"], non_tensor_batch_keys=[])
        done = fleet.generate_sequences(prompts)
        columns = {**rows.non_tensor_batch, **done.non_tensor_batch}
        counts = {name: count - before[name] for name, count in fleet.metrics().items()}
        return DataProto(done.batch, columns, dict(rows.meta_info)), counts

    return generate


def connect_weights(groups: WorkerGroups, cfg: PPOConfig, *, colocated: bool) -> ShardingManager:
    """The manager that reshards the actor's weights into the rollout, connected."""
    backend = cfg.actor_rollout_ref.rollout.checkpoint_engine.backend
    local = colocated and backend != "shm"
    if not colocated and backend in ("local", "gather"):
        raise ConfigError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend} needs actor and rollout in one process; "
            "write auto or shm where the rollout has processes of its own"
        )
    manager = FSDPHFShardingManager(
        groups.actor,
        groups.actor if local else groups.rollout,
        executor="local" if local else "shm",
        deadline_s=cfg.trainer.deadlines.weights_s,
        report_dir=cfg.actor_rollout_ref.rollout.validate_save_dir,
    )
    manager.connect()
    return manager
