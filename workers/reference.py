"""The reference: the frozen policy that KL terms compare with."""

from __future__ import annotations

from typing import Any

from rlsys.config.schema_actor import ActorRolloutRefConfig
from rlsys.protocol import DataProto
from rlsys.single_controller.base import Worker
from rlsys.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from workers.engines import EngineRun, build_reference_engine

MESH = "ref"
BY_MESH: Any = make_nd_compute_dataproto_dispatch_fn(MESH)


class ReferenceWorker(Worker):
    """One rank of the reference."""

    def __init__(self, config: ActorRolloutRefConfig, run: EngineRun) -> None:
        self.cfg, self.run = config, run

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the frozen model."""
        self.engine = build_reference_engine(self.cfg, self.run)
        self._register_dispatch_collect_info(MESH, self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=BY_MESH)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` (B, R) at the sampling temperature."""
        found = self.engine.forward(data, ("log_probs",), temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"ref_log_prob": found["log_probs"]})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self, parts: tuple[str, ...], device: str) -> None:
        """Send parameters to another device."""
        self.engine.move(parts, device)  # pyrefly: ignore[bad-argument-type]
