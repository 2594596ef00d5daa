"""The critic: the value function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsys.config.schema_actor import CriticConfig
from rlsys.protocol import DataProto
from rlsys.roles.critic import PPOCritic
from rlsys.single_controller.base import Worker
from rlsys.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from workers.engines import EngineRun, build_critic_engine, critic_settings, meter_of

MESH = "critic"
BY_MESH: Any = make_nd_compute_dataproto_dispatch_fn(MESH)


class CriticWorker(Worker):
    """One rank of the critic."""

    def __init__(self, config: CriticConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and its optimizer."""
        self.engine = build_critic_engine(self.cfg, self.run)
        self._register_dispatch_collect_info(MESH, self.engine.dp_rank, self.engine.is_collect)
        self.critic = PPOCritic(self.engine, critic_settings(self.cfg, self.run, dp_size=self.engine.dp_size))
        self.mfu = meter_of(self.cfg.model, self.engine, self.run, lm_head=False)

    @register(dispatch_mode=BY_MESH)
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` (B, R)."""
        return self.critic.compute_values(data)

    @register(dispatch_mode=BY_MESH)
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on this rank's rows; the metrics are global means."""
        with self.mfu("critic", data, epochs=self.cfg.ppo_epochs) as used:
            metrics = self.critic.ppo_update(data)
        return DataProto(meta_info={"metrics": metrics | used})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        self.engine.save(Path(path), "resume")
        if "hf_model" in self.cfg.checkpoint.save_contents:
            self.engine.save(Path(path) / "huggingface", "export")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        self.engine.load(Path(path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self, parts: tuple[str, ...], device: str) -> None:
        """Send parameters or optimizer state to another device."""
        self.engine.move(parts, device)  # pyrefly: ignore[bad-argument-type]
