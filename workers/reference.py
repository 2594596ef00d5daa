"""The reference: the frozen policy that KL terms compare with."""

from __future__ import annotations

from rlsys.config.schema.actor import ActorRolloutRefConfig
from rlsys.protocol import DataProto
from rlsys.single_controller.dispatch import Dispatch, register
from workers.base import BY_MESH, EngineWorker
from workers.build import EngineRun, build_reference_engine


class ReferenceWorker(EngineWorker):
    """One rank of the reference."""

    def __init__(self, config: ActorRolloutRefConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the frozen model."""
        self.use_engine(build_reference_engine(self.cfg, self.run))

    @register(dispatch_mode=BY_MESH)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` (B, R) at the sampling temperature."""
        outputs = self.engine.forward(data, ("log_probs",), temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})
