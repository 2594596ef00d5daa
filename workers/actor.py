"""The actor: the policy that is trained. Also the reference where LoRA leaves the base weights untouched."""

from functools import cached_property

from rlsys.config.schema.actor import ActorRolloutRefConfig
from rlsys.config.schema.algorithm import AlgorithmConfig, DistillationLossConfig
from rlsys.protocol import DataProto
from rlsys.roles.actor import PPOActor
from rlsys.single_controller.dispatch import Dispatch, register
from rlsys.types import TransferReport
from rlsys.weights.endpoints import WeightSender
from rlsys.weights.executors.in_process import LocalReshard
from workers.base import BY_MESH, EngineWorker
from workers.build import EngineRun, build_actor_engine, make_mfu_meter
from workers.colocated import local_rollout


class ActorWorker(EngineWorker, WeightSender):
    """One rank of the actor."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        algorithm: AlgorithmConfig,
        run: EngineRun,
        distillation: DistillationLossConfig | None = None,
    ) -> None:
        self.cfg, self.algorithm, self.run, self.distillation = config, algorithm, run, distillation
        self.saves_hf_model = "hf_model" in config.actor.checkpoint.save_contents

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and its optimizer."""
        self.use_engine(build_actor_engine(self.cfg, self.run))
        self.actor = PPOActor(
            self.engine,
            self.cfg.actor,
            rollout_n=self.run.rollout_n,
            rollout_correction=self.algorithm.rollout_correction,
            distillation=self.distillation,
        )
        self.mfu = make_mfu_meter(self.cfg.model, self.engine, self.run)

    @register(dispatch_mode=BY_MESH)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs`, `entropys` and, for estimators that need it, `sum_pi_squared` (B, R)."""
        squares = self.algorithm.adv_estimator.endswith("optimal_token_baseline")
        with self.mfu("actor_infer", data) as mfu:
            columns = self.actor.compute_logp(data, entropy=True, sum_pi_squared=squares)
        return DataProto(columns.batch, meta_info={"metrics": mfu})

    @register(dispatch_mode=BY_MESH)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` (B, R) of the base model, with the adapters switched off."""
        with self.engine.adapters_disabled():
            return self.actor.compute_logp(data, name="ref_log_prob")

    @register(dispatch_mode=BY_MESH)
    def update_actor(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; the metrics are global means."""
        with self.mfu("actor", data, epochs=self.cfg.actor.ppo_epochs) as mfu:
            metrics = self.actor.ppo_update(data)
        return DataProto(meta_info={"metrics": metrics | mfu})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reshard_weights(self, version: int) -> TransferReport:
        """Copy the weights into the rollout engine of the same process."""
        return self._local.push(version)

    @cached_property
    def _local(self) -> LocalReshard:
        return LocalReshard(self.engine, local_rollout(), offloads=self.cfg.model.has_adapters)
