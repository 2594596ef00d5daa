"""How the actor's weights reach the rollout: by a sharding manager or, for external servers, through files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.config import PPOConfig
from rlsys.config.engines import rollout_backend, worker_class
from rlsys.fleet.external.engine import RemoteEngine
from rlsys.fleet.external.settings import settings_of
from rlsys.fleet.external.transfer import BroadcastTransfer, ExternalTransfer
from rlsys.fleet.fleet import RolloutFleet
from rlsys.interfaces import WeightTransfer
from rlsys.models.hf import saved_config
from rlsys.telemetry.log import get_logger
from rlsys.types import TransferReport
from rlsys.utils.errors import DeadlineError, WeightTransferError, WorkerError
from rlsys.weights.sharding_manager import ShardingManager
from trainer.groups import ActorGroup, WorkerGroups

log = get_logger(__name__)


@dataclass(frozen=True)
class WeightPush:
    """Pushes weights into the engines of a fleet; with `validate` every push is compared tensor by tensor."""

    transfer: WeightTransfer
    fleet: RolloutFleet
    validate: bool

    def push(self, version: int) -> TransferReport:
        """Bring the engines to the actor's weights; unfinished answers continue with them.

        If a replica is lost meanwhile, it is restarted or left out and the weights are pushed again: once, or up to
        `max_restarts` times while worker processes die.
        """
        num_left, connect = self.fleet.max_restarts, lambda: None
        while True:
            try:
                return self._push(version, connect)
            except (WorkerError, DeadlineError, WeightTransferError) as error:
                if not isinstance(self.transfer, ShardingManager) or not num_left:
                    raise
                log.warning("version %d is pushed again: %s", version, error)
                num_left = num_left - 1 if isinstance(error, WorkerError) else 0
                connect = self.transfer.connect

    def _push(self, version: int, connect: Callable[[], None]) -> TransferReport:
        with self.fleet.pushing(version):
            connect()
            report = self.transfer.push(version)
            if self.validate:
                self.transfer.validate()
        return report

    def push_again(self) -> None:
        """Bring back the weights that were served, if there were any."""
        if self.transfer.version is not None:
            self.push(self.transfer.version)


def drops_weights_on_sleep(cfg: PPOConfig) -> bool:
    """Whether sleeping engines lose their weights: copies to the host are slow, and each step pushes new ones."""
    rollout = cfg.actor_rollout_ref.rollout
    return rollout_backend(rollout.name).drops_weights and rollout.free_cache_engine and cfg.trainer.sync_freq == 1


def connect_weights(groups: WorkerGroups, cfg: PPOConfig, *, colocated: bool) -> ShardingManager:
    """The manager that reshards the actor's weights into the rollout, connected."""
    assert groups.rollout is not None, "external servers take weights from files"
    policy = cfg.actor_rollout_ref
    engine = policy.rollout.checkpoint_engine
    in_process = colocated and rollout_backend(policy.rollout.name).weights_in == "process"
    local = engine.backend == "local" or (engine.backend == "auto" and in_process and groups.actor.world_size == 1)
    disk = engine.backend == "disk"
    manager = ShardingManager(
        groups.actor,
        groups.rollout,
        executor="local" if local else engine.backend,
        deadline_s=cfg.trainer.deadlines.weights_s,
        report_dir=policy.rollout.validate_save_dir,
        disk_root=Path(cfg.trainer.default_local_dir) / "served_weights" if disk else None,
        disk_assets=(policy.model.path or "") if disk else "",
        bucket_bytes=engine.update_weights_bucket_megabytes << 20,
        offloads=policy.actor.shard.param_offload or (colocated and policy.model.has_adapters),
    )
    if policy.rollout.min_replicas is None:  # else its fleet connects it to those that serve
        manager.connect()
    return manager


def connect_servers(cfg: PPOConfig, actor: ActorGroup) -> tuple[RemoteEngine, ExternalTransfer | BroadcastTransfer]:
    """A fleet over the configured external servers, connected, and the transfer of the actor's weights to them."""
    rollout, deadlines = cfg.actor_rollout_ref.rollout, cfg.trainer.deadlines
    path = cfg.actor_rollout_ref.model.path
    settings = settings_of(rollout, deadlines, max_staleness=cfg.trainer.max_staleness)
    engine: RemoteEngine = worker_class(rollout.name)(replace(settings, hf_config=saved_config(path) if path else None))
    engine.connect()
    if rollout.checkpoint_engine.backend == "nccl":
        bucket_bytes = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        return engine, BroadcastTransfer(actor, engine, bucket_bytes=bucket_bytes, deadline_s=deadlines.weights_s)
    folder = Path(rollout.servers.weights_dir).absolute()
    return engine, ExternalTransfer(actor, engine, folder, rollout.servers.lora_name or "", deadlines.weights_s)
