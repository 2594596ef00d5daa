"""The reward model: a trained model as grader."""

from __future__ import annotations

from typing import Any

from rlsys.config.schema_algorithm import RewardModelConfig
from rlsys.protocol import DataProto
from rlsys.roles.reward_model import RWEngine
from rlsys.single_controller.base import Worker
from rlsys.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from workers.engines import EngineRun, build_reward_engine

MESH = "rm"
BY_MESH: Any = make_nd_compute_dataproto_dispatch_fn(MESH)


class RewardModelWorker(Worker):
    """One rank of the reward model."""

    def __init__(self, config: RewardModelConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the frozen model."""
        self.engine = build_reward_engine(self.cfg, self.run)
        self._register_dispatch_collect_info(MESH, self.engine.dp_rank, self.engine.is_collect)
        self.model = RWEngine(self.engine)

    @register(dispatch_mode=BY_MESH)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` (B, R): the score on the last valid token of each response."""
        return self.model.score(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self, parts: tuple[str, ...], device: str) -> None:
        """Send parameters to another device."""
        self.engine.move(parts, device)  # pyrefly: ignore[bad-argument-type]
