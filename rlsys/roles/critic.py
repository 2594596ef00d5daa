"""PPOCritic: the clipped value loss on a training engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms import compute_value_loss
from rlsys.interfaces import LossSum, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.minibatches import mean_metrics, mini_batches


@dataclass(frozen=True)
class CriticSettings:
    """The value loss and how the critic goes through a step's rows; `mini_batch_rows` counts on one rank."""

    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    mini_batch_rows: int = 1
    ppo_epochs: int = 1
    shuffle: bool = False
    seed: int = 0


class PPOCritic:
    """The critic on any TrainEngine with a scalar head; every method is collective over its ranks."""

    def __init__(self, engine: TrainEngine, settings: CriticSettings) -> None:
        self.engine, self.settings = engine, settings

    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` (B, R): of the state before each response token."""
        return DataProto.from_dict({"values": self.engine.forward(batch, ["values"])["values"]})

    def ppo_update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step a mini-batch; metrics are means over these steps, `critic/skipped_steps` their count.

        Needs values, returns and response_mask.
        """
        settings = self.settings
        parts = mini_batches(
            batch,
            rows=settings.mini_batch_rows,
            epochs=settings.ppo_epochs,
            shuffle=settings.shuffle,
            seed=settings.seed,
            step=int(batch.meta_info.get("global_steps", 0)),
        )
        return mean_metrics([self.train_batch(part) for part in parts])

    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on all rows of all ranks."""
        loss = partial(self._loss, batch_rows=len(batch) * self.engine.dp_size)
        metrics = self.engine.forward_backward(batch, loss, outputs=["values"])
        report = self.engine.optim_step()
        return {
            **{name: value for name, value in metrics.items() if name != "loss"},
            "critic/grad_norm": report.grad_norm,
            "critic/lr": report.lr,
            "critic/skipped_steps": float(not report.applied),
        }

    def _loss(self, outputs: Mapping[str, Tensor], rows: TensorDict, *, batch_rows: int) -> LossSum:
        return compute_value_loss(
            vpreds=outputs["values"],
            returns=rows["returns"],
            values=rows["values"],
            response_mask=rows["response_mask"],
            cliprange_value=self.settings.cliprange_value,
            loss_agg_mode=self.settings.loss_agg_mode,
            loss_scale_factor=self.settings.loss_scale_factor,
            batch_rows=batch_rows,
        )
