"""Losses that couple rows, such as the two responses of a pair, which an engine may put into different micro-batches.

The outputs of all rows are computed first; the step then uses the loss linearised at them, which has the same gradient
however rows are split. B rows of this rank, R response tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.masked import to_loss_sum
from rlsys.algorithms.stages import with_columns
from rlsys.interfaces import LossSum, Output, TrainEngine
from rlsys.protocol import DataProto
from rlsys.roles.lm import RankSums
from rlsys.roles.update import run_updates


@dataclass(frozen=True)
class RowLoss:
    """The loss, what it counts, and (values, counts) of metrics, each (B,)."""

    loss: Tensor
    count: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]]

    def sums(self, prefix: str) -> RankSums:
        """The loss and all metrics as (sum, count)."""
        every = {"loss": (self.loss, self.count), **self.metrics}
        return {f"{prefix}/{name}": (float(v.detach().sum()), float(count.sum())) for name, (v, count) in every.items()}


def at_first(values: Tensor) -> Tensor:
    """Values of pairs (B / 2,) in the first row of each, 0 in the second (B,)."""
    return torch.stack([values, torch.zeros_like(values)], dim=1).flatten()


def train_pairwise(
    engine: TrainEngine, batch: DataProto, output: Output, row_loss: Callable[[Tensor], RowLoss]
) -> dict[str, float]:
    """One optimizer step on all rows by `row_loss`, a function of the engine's `output` (B, R) on the CPU.

    Metrics: train/loss and those of `row_loss`, train/grad_norm, train/lr, train/skipped_steps.
    """
    values = engine.forward(batch, (output,))[output].cpu().requires_grad_()
    rows_loss = row_loss(values)
    (slope,) = torch.autograd.grad(rows_loss.loss.sum(), values)
    metrics = {"loss": (rows_loss.loss.detach(), rows_loss.count), **rows_loss.metrics}
    columns = {"slope": slope, "counted": rows_loss.count}
    for name, (row_values, counts) in metrics.items():
        columns |= {f"sum of {name}": row_values.detach(), f"count of {name}": counts}

    def linear(outputs: Mapping[str, Tensor], rows: TensorDict) -> LossSum:
        sums = {f"train/{name}": (rows[f"sum of {name}"].sum(), rows[f"count of {name}"].sum()) for name in metrics}
        return to_loss_sum((outputs[output] * rows["slope"]).sum(), rows["counted"].sum(), sums)

    return run_updates(engine, [(with_columns(batch, **columns), linear)], outputs=(output,), prefix="train")
