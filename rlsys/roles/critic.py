"""The critic: values of states, and their regression on returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms import LOSS_AGG_MODES, compute_value_loss
from rlsys.interfaces import LossFn, LossSum, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.update import MiniBatch, UpdateSettings, mini_batches, run_updates


@dataclass(frozen=True)
class CriticSettings:
    """How far values may move before their gradient stops, how tokens are averaged, and in which steps."""

    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    updates: UpdateSettings = field(default_factory=UpdateSettings)

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode '{self.loss_agg_mode}', one of {', '.join(LOSS_AGG_MODES)}")
        if self.cliprange_value <= 0:
            raise ValueError(f"cliprange_value must be positive, got {self.cliprange_value}")


class PPOCritic:
    """A value model on an engine. Every method is collective over the engine's ranks and takes this rank's rows."""

    def __init__(self, engine: TrainEngine, settings: CriticSettings) -> None:
        self.engine = engine
        self.settings = settings

    def compute_values(self, batch: DataProto) -> DataProto:
        """Column `values` (B, R): of the state before each response token."""
        return DataProto.from_dict(tensors={"values": self.engine.forward(batch, ("values",))["values"]})

    def ppo_update(self, batch: DataProto) -> dict[str, float]:
        """Train on the rows in mini-batches (values, returns, response_mask); returns verl's `critic/*` metrics."""
        return self._update(batch, self.settings.updates)

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows."""
        return self._update(batch, UpdateSettings())

    def _update(self, batch: DataProto, updates: UpdateSettings) -> dict[str, float]:
        assert batch.batch is not None, "a critic trains on tensors"
        scale = self.settings.loss_scale_factor or float(batch.batch["response_mask"].shape[1])

        def make_loss(part: MiniBatch) -> tuple[DataProto, LossFn]:
            return part.rows, self._loss_fn(scale, len(part.rows) * self.engine.dp_size)

        step = int(batch.meta_info.get("global_steps", 0))
        parts = mini_batches(batch, updates, step=step)
        return run_updates(self.engine, parts, make_loss, outputs=("values",), prefix="critic")

    def _loss_fn(self, scale: float, batch_rows: int) -> LossFn:
        def loss(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
            return compute_value_loss(
                vpreds=outputs["values"],
                returns=rows["returns"],
                values=rows["values"],
                response_mask=rows["response_mask"],
                cliprange_value=self.settings.cliprange_value,
                loss_agg_mode=self.settings.loss_agg_mode,
                loss_scale_factor=scale,
                batch_rows=batch_rows,
            )

        return loss
