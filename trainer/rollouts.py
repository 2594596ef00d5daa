"""Wires the rollout into the trainer: how weights are pushed and prompts answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rlsys.config import PPOConfig
from rlsys.config.schema.rollout import GenerationConfig
from rlsys.fleet.external.engine import SGLangRemoteEngine, VLLMRemoteEngine
from rlsys.fleet.external.replica import ExternalFleet
from rlsys.fleet.external.settings import settings_of
from rlsys.fleet.external.transfer import ExternalTransfer
from rlsys.fleet.fleet import RolloutFleet
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


def external_rollout(cfg: PPOConfig, actor: Any) -> tuple[ExternalFleet, ExternalTransfer]:
    """A fleet over the configured servers, connected, and what brings the actor's weights to them."""
    rollout, deadlines = cfg.actor_rollout_ref.rollout, cfg.trainer.deadlines
    settings = settings_of(rollout, deadlines, max_staleness=cfg.trainer.max_staleness)
    engine_cls = SGLangRemoteEngine if rollout.name == "sglang_remote" else VLLMRemoteEngine
    engine = engine_cls(settings)
    engine.connect()
    fleet = ExternalFleet(engine, generate_s=deadlines.generate_s, max_staleness=cfg.trainer.max_staleness)
    folder = Path(rollout.servers.weights_dir).absolute()
    return fleet, ExternalTransfer(actor, engine, folder, rollout.servers.lora_name or "", deadlines.weights_s)
