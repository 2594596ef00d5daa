"""Supervised roles: a language model on texts, a reward model on pairs."""

from __future__ import annotations

from typing import Literal

from rlsys.config import RMConfig, SFTConfig
from rlsys.protocol import DataProto
from rlsys.roles.lm import LMEngine
from rlsys.roles.reward_model import RWEngine
from rlsys.single_controller.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from workers.base import EngineWorker
from workers.build import EngineRun, build_supervised_engine

MESH = "train"
BY_MESH = make_nd_compute_dataproto_dispatch_fn(MESH)


class SupervisedWorker(EngineWorker):
    """One rank of an SFT ("lm") or reward-model ("rm") run."""

    def __init__(self, config: SFTConfig | RMConfig, run: EngineRun, kind: Literal["lm", "rm"]) -> None:
        self.cfg, self.run, self.kind = config, run, kind

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and its optimizer."""
        self.use_engine(build_supervised_engine(self.cfg, self.run, value_head=self.kind == "rm"), MESH)
        self.role = LMEngine(self.engine) if self.kind == "lm" else RWEngine(self.engine)

    @register(dispatch_mode=BY_MESH)
    def train_batch(self, data: DataProto) -> DataProto:
        """One optimizer step on this batch; the metrics are global means."""
        return DataProto(meta_info={"metrics": self.role.train_batch(data)})

    @register(dispatch_mode=BY_MESH)
    def eval_batch(self, data: DataProto) -> dict[str, tuple[float, float]]:
        """`val/*` of this rank's rows as (sum, count), without a step."""
        return self.role.evaluate_lm(data) if isinstance(self.role, LMEngine) else self.role.evaluate_rw(data)
