"""The actor: the policy that is trained. Also the reference where LoRA leaves the base weights untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsys.config.schema_actor import ActorRolloutRefConfig
from rlsys.protocol import DataProto
from rlsys.roles.actor import PPOActor
from rlsys.single_controller.base import Worker
from rlsys.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from rlsys.types import WeightLayout
from rlsys.weights.local import local_sums, reshard_local
from rlsys.weights.sides import Spec, WeightSender
from rlsys.weights.target import Moved
from rlsys.weights.verify import BoxSum, LayoutSums
from workers.engines import EngineRun, actor_settings, build_actor_engine, meter_of
from workers.weights import rollout_of_this_process

MESH = "actor"
BY_MESH: Any = make_nd_compute_dataproto_dispatch_fn(MESH)


class ActorWorker(Worker):
    """One rank of the actor."""

    def __init__(self, config: ActorRolloutRefConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and its optimizer."""
        self.engine = build_actor_engine(self.cfg, self.run)
        self._register_dispatch_collect_info(MESH, self.engine.dp_rank, self.engine.is_collect)
        self.actor = PPOActor(self.engine, actor_settings(self.cfg, self.run, dp_size=self.engine.dp_size))
        self.sender = WeightSender(self.engine)
        self.mfu = meter_of(self.cfg.model, self.engine, self.run)

    @register(dispatch_mode=BY_MESH)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and, where asked for, `entropys` and `sum_pi_squared` (B, R)."""
        entropy, sum_pi_squared = self.run.with_entropy, self.run.with_sum_pi_squared
        with self.mfu("actor_infer", data) as used:
            found = self.actor.compute_logp(data, entropy=entropy, sum_pi_squared=sum_pi_squared)
        return DataProto(found.batch, meta_info={"metrics": used})

    @register(dispatch_mode=BY_MESH)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` (B, R) of the base model, with the adapters switched off."""
        with self.engine.adapters_disabled():
            return self.actor.compute_logp(data, name="ref_log_prob")

    @register(dispatch_mode=BY_MESH)
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; the metrics are global means."""
        with self.mfu("actor", data, epochs=self.cfg.actor.ppo_epochs) as used:
            metrics = self.actor.ppo_update(data)
        return DataProto(meta_info={"metrics": metrics | used})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        self.engine.save(Path(path), "resume")
        if "hf_model" in self.cfg.actor.checkpoint.save_contents:
            self.engine.save(Path(path) / "huggingface", "export")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        self.engine.load(Path(path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, path: str) -> None:
        """Write the model as a Hugging Face folder."""
        self.engine.save(Path(path), "export")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self, parts: tuple[str, ...], device: str) -> None:
        """Send parameters or optimizer state to another device."""
        self.engine.move(parts, device)  # pyrefly: ignore[bad-argument-type]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reshard_weights(self, version: int) -> Moved:
        """Copy the weights into the rollout engine of the same process."""
        bucket_bytes = self.cfg.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        return reshard_local(self.engine, rollout_of_this_process(), version=version, bucket_bytes=bucket_bytes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_sums(self) -> tuple[LayoutSums, LayoutSums]:
        """Checksums of the actor's and of the rollout's tensors in this process."""
        return local_sums(self.engine, rollout_of_this_process())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_layout(self) -> WeightLayout:
        return self.sender.weight_layout()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weight_transfer(self, spec: Spec) -> Any:
        return self.sender.open_weight_transfer(spec)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_step(self, step: str, *args: Any) -> Any:
        return self.sender.weight_step(step, *args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, version: int) -> Any:
        return self.sender.send_weights(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_checksum(self, dtypes: dict[str, str] | None = None) -> tuple[BoxSum, ...]:
        return self.sender.weight_checksum(dtypes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_weight_transfer(self) -> None:
        self.sender.close_weight_transfer()
