"""Supervised roles: a language model on texts, a reward model or a policy on preferences."""

from rlsys.config import DPOConfig, RMConfig, SFTConfig
from rlsys.protocol import DataProto
from rlsys.roles.dpo import DPOEngine
from rlsys.roles.lm import LMEngine
from rlsys.roles.reward_model import RWEngine
from rlsys.single_controller.dispatch import Dispatch, register
from workers.base import BY_MESH, EngineWorker
from workers.build import EngineRun, build_supervised_engine


class SupervisedWorker(EngineWorker):
    """One rank of an SFT, reward-model or DPO run."""

    def __init__(self, config: SFTConfig | RMConfig | DPOConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and its optimizer."""
        cfg = self.cfg
        self.use_engine(build_supervised_engine(cfg, self.run))
        if isinstance(cfg, DPOConfig):
            reference = None if cfg.model.has_adapters else build_supervised_engine(cfg, self.run, frozen=True)
            self.role = DPOEngine(self.engine, cfg.dpo, reference)
        else:
            self.role = RWEngine(self.engine) if isinstance(cfg, RMConfig) else LMEngine(self.engine)

    @register(dispatch_mode=BY_MESH)
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimizer step on this batch; the metrics are global means."""
        return DataProto(meta_info={"metrics": self.role.train_batch(data)})

    @register(dispatch_mode=BY_MESH)
    def eval_batch(self, data: DataProto) -> dict[str, tuple[float, float]]:
        """`val/*` of this rank's rows as (sum, count), without a step."""
        return self.role.evaluate(data)
