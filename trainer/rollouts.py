"""The rollout group as a fleet of replicas, and the way of the actor's weights into it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlsys.config import EvalConfig, PPOConfig
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.protocol import DataProto
from rlsys.types import TransferReport
from rlsys.utils.errors import ConfigError
from rlsys.weights.sharding_manager import (
    FSDPHFShardingManager,
    FSDPSGLangShardingManager,
    FSDPVLLMShardingManager,
    MegatronHFShardingManager,
    MegatronSGLangShardingManager,
    MegatronVLLMShardingManager,
    ShardingManager,
)
from trainer.generation import Generate
from trainer.groups import WorkerGroups


@dataclass(frozen=True)
class GroupReplica:
    """Ranks of the rollout group that serve together, as the fleet sees them; the first one's answer counts."""

    group: Any
    rank: int
    size: int = 1

    @property
    def name(self) -> str:
        return f"rollout {self.rank}"

    def generate(self, work: Any, deadline_s: float) -> Any:
        stage, end_s = "generate_sequences", time.monotonic() + deadline_s
        ranks = range(self.rank, self.rank + self.size)
        asked = [self.group.execute_rank_async(rank, "generate_sequences", work, stage=stage) for rank in ranks]
        first, *_ = [one.get(max(0.01, end_s - time.monotonic())) for one in asked]
        return first

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

    One that dies is restarted, unless the actor lived in its process too or it served together with others.
    """
    size = cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    replicas = [GroupReplica(group, rank, size) for rank in range(0, group.world_size, size)]
    share = -(-rows // len(replicas))

    def restore(replica: Any) -> None:
        assert transfer is not None
        transfer.restore(replica.rank)

    return RolloutFleet(
        replicas,
        chunk_rows=min(share, cfg.actor_rollout_ref.rollout.max_num_seqs),
        deadlines=FleetDeadlines(generate_s=cfg.trainer.deadlines.generate_s, restart_s=cfg.trainer.deadlines.start_s),
        on_restart=None if transfer is None else restore,
        max_restarts=3 if restartable and size == 1 else 0,
        max_staleness=max_staleness,
    )


class Transfer(Protocol):
    """What brings the actor's weights to the rollout."""

    @property
    def version(self) -> int | None: ...
    def push(self, version: int) -> TransferReport: ...
    def validate(self) -> object: ...


def push_by(transfer: Transfer, fleet: RolloutFleet, *, validate: bool) -> Callable[[int], TransferReport]:
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


def generate_by(fleet: RolloutFleet, shown: Callable[[DataProto], None] | None = None) -> Generate:
    """Rows in, completed rows out, with the counts of what this call took; `shown` gets to see them."""

    def generate(rows: DataProto) -> tuple[DataProto, dict[str, float]]:
        before = {name: 0.0 if name.endswith("_ready") else count for name, count in fleet.metrics().items()}
        prompts = rows.select(batch_keys=["prompts", "attention_mask"], non_tensor_batch_keys=[])
        done = fleet.generate_sequences(prompts)
        columns = {**rows.non_tensor_batch, **done.non_tensor_batch}
        counts = {name: count - before[name] for name, count in fleet.metrics().items()}
        if shown is not None:
            shown(done)
        return DataProto(done.batch, columns, dict(rows.meta_info)), counts

    return generate


def printer(rollout: GenerationConfig, tokenizer: Any) -> Callable[[DataProto], None] | None:
    """What prints each answer, its text and its token ids, where `rollout.print_outputs` asks for it."""
    if not rollout.print_outputs:
        return None

    def show(batch: DataProto) -> None:
        responses, mask = batch.tensors["responses"], batch.tensors["response_mask"].bool()
        for row, (ids, kept) in enumerate(zip(responses, mask, strict=True)):
            answer = ids[kept].tolist()
            print(f"--- answer {row}: {tokenizer.decode(answer)}\n{answer}", flush=True)

    return show


MANAGERS: dict[tuple[str, str], type[ShardingManager]] = {
    ("fsdp", "hf"): FSDPHFShardingManager,
    ("fsdp", "sglang"): FSDPSGLangShardingManager,
    ("fsdp", "vllm"): FSDPVLLMShardingManager,
    ("megatron", "hf"): MegatronHFShardingManager,
    ("megatron", "sglang"): MegatronSGLangShardingManager,
    ("megatron", "vllm"): MegatronVLLMShardingManager,
}


def gives_up_weights(cfg: PPOConfig) -> bool:
    """Whether sleeping rollout engines lose their weights: copies to the host are slow, and each step pushes others."""
    rollout = cfg.actor_rollout_ref.rollout
    return rollout.free_cache_engine and rollout.name in ("sglang", "vllm") and cfg.trainer.sync_freq == 1


APART = ("sglang",)
"""Engines whose weights are in a process of their own even where actor and rollout share one."""


def connect_weights(groups: WorkerGroups, cfg: PPOConfig, *, colocated: bool) -> ShardingManager:
    """The manager that reshards the actor's weights into the rollout, connected."""
    policy = cfg.actor_rollout_ref
    engine = policy.rollout.checkpoint_engine
    if engine.backend == "local" and not colocated:
        raise ConfigError(
            "actor_rollout_ref.rollout.checkpoint_engine.backend=local needs actor and rollout in one process; "
            "write auto where the rollout has processes of its own"
        )
    alone = groups.actor.world_size == 1 or cfg.trainer.nnodes > 1
    near = policy.rollout.name not in APART
    local = engine.backend == "local" or (engine.backend == "auto" and colocated and alone and near)
    disk = engine.backend == "disk"
    manager = MANAGERS["megatron" if policy.actor.strategy == "megatron" else "fsdp", policy.rollout.name](
        groups.actor,
        groups.actor if local else groups.rollout,
        executor="local" if local else engine.backend,
        deadline_s=cfg.trainer.deadlines.weights_s,
        report_dir=policy.rollout.validate_save_dir,
        disk_root=Path(cfg.trainer.default_local_dir) / "served_weights" if disk else None,
        disk_assets=(policy.model.path or "") if disk else "",
        bucket_bytes=engine.update_weights_bucket_megabytes << 20,
    )
    manager.connect()
    return manager
