"""The reward model: a trained model as grader."""

from rlsys.config.schema.algorithm import RewardModelConfig
from rlsys.protocol import DataProto
from rlsys.roles.reward_model import RWEngine
from rlsys.single_controller.dispatch import Dispatch, register
from workers.base import BY_MESH, EngineWorker
from workers.build import EngineRun, build_reward_engine


class RewardModelWorker(EngineWorker):
    """One rank of the reward model."""

    def __init__(self, config: RewardModelConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the frozen model."""
        self.use_engine(build_reward_engine(self.cfg, self.run))
        self.model = RWEngine(self.engine)

    @register(dispatch_mode=BY_MESH)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` (B, R): the score on the last valid token of each response."""
        return self.model.score(data)
