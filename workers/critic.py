"""The critic: the value function."""

from rlsys.config.schema.actor import CriticConfig
from rlsys.protocol import DataProto
from rlsys.roles.critic import PPOCritic
from rlsys.single_controller.dispatch import Dispatch, register
from workers.base import BY_MESH, EngineWorker
from workers.build import EngineRun, build_critic_engine, make_mfu_meter


class CriticWorker(EngineWorker):
    """One rank of the critic."""

    def __init__(self, config: CriticConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run
        self.saves_hf_model = "hf_model" in config.checkpoint.save_contents

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and its optimizer."""
        self.use_engine(build_critic_engine(self.cfg, self.run))
        self.critic = PPOCritic(self.engine, self.cfg, rollout_n=self.run.rollout_n)
        self.mfu = make_mfu_meter(self.cfg.model, self.engine, self.run, lm_head=False)

    @register(dispatch_mode=BY_MESH)
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` (B, R)."""
        return self.critic.compute_values(data)

    @register(dispatch_mode=BY_MESH)
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; the metrics are global means."""
        with self.mfu("critic", data, epochs=self.cfg.ppo_epochs) as mfu:
            metrics = self.critic.ppo_update(data)
        return DataProto(meta_info={"metrics": metrics | mfu})
