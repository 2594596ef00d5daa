"""What the workers of several roles share: checkpoints and moves of a training engine, one end of weight transfers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsys.single_controller.base import Worker
from rlsys.single_controller.base.decorator import Dispatch, register
from rlsys.types import WeightLayout
from rlsys.weights.executors.endpoints import Spec
from rlsys.weights.verify import BoxSum


class EngineWorker(Worker):
    """One rank of a role that holds a training engine."""

    engine: Any
    saves_hf_model = False
    """Whether a Hugging Face folder is written beside each checkpoint."""

    def use_engine(self, engine: Any, mesh: str) -> None:
        """Hold the engine and tell the group which rows this rank gets."""
        self.engine = engine
        self._register_dispatch_collect_info(mesh, engine.dp_rank, engine.is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        self.engine.save(Path(path), "resume")
        if self.saves_hf_model:
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
        """Send parameters, gradients or optimizer state to another device."""
        self.engine.move(parts, device)


class TransferWorker(Worker):
    """One rank of either side of weight transfers; `end` is its WeightSender or WeightReceiver."""

    end: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_layout(self) -> WeightLayout:
        return self.end.weight_layout()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weight_transfer(self, spec: Spec) -> Any:
        return self.end.open_weight_transfer(spec)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_step(self, step: str, *args: Any) -> Any:
        return self.end.weight_step(step, *args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_checksum(self, dtypes: dict[str, str] | None = None) -> tuple[BoxSum, ...]:
        return self.end.weight_checksum(dtypes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_weight_transfer(self) -> None:
        self.end.close_weight_transfer()
