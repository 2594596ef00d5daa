"""Updates of every role: mini-batches in a fixed order, one optimizer step each; losses that couple rows.

B rows of this rank, R response tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.masked import to_loss_sum
from rlsys.algorithms.stages import episode_rows, rows_per_episode, with_columns
from rlsys.config.schema.actor import ActorConfig, CriticConfig
from rlsys.interfaces import LossFn, LossSum, Output, TrainEngine
from rlsys.protocol import DataProto
from rlsys.types import StepReport

C = TypeVar("C", ActorConfig, CriticConfig)
LossParts = Iterable[tuple[DataProto, LossFn]]
"""Mini-batches, each with its loss."""
RankSums = dict[str, tuple[float, float]]
"""Metrics of one rank as (sum, count), see `mean_over_ranks`."""


def mini_batches(
    batch: DataProto, config: ActorConfig | CriticConfig, *, rollout_n: int, dp_size: int
) -> Iterator[DataProto]:
    """This rank's share of each mini-batch: `ppo_mini_batch_size` prompts of `rollout_n` answers by `dp_size` ranks.

    They are contiguous. With `shuffle` each of the `ppo_epochs` has its own order, which depends only on
    `data_loader_seed`, the global step and the epoch, so it is the same on every rank.
    """
    num_rows = config.ppo_mini_batch_size * rollout_n * rows_per_episode(batch) // dp_size
    if num_rows < 1:
        raise ValueError(f"ppo_mini_batch_size={config.ppo_mini_batch_size} gives {dp_size} ranks no row each")
    for epoch in range(config.ppo_epochs):
        rows = batch
        if config.shuffle:
            seeds = np.random.SeedSequence([config.data_loader_seed, global_step(batch), epoch])
            (state,) = seeds.generate_state(1, np.uint64)
            draw = torch.Generator().manual_seed(int(state) >> 1)
            order = torch.randperm(len(batch) // rows_per_episode(batch), generator=draw)
            rows = batch.select_idxs(episode_rows(batch, order))
        yield from rows.split(num_rows)


def with_scale(config: C, batch: DataProto) -> C:
    """The constant of seq-mean-token-sum-norm is the width of the whole batch, not of a trimmed micro-batch."""
    width = float(batch.tensors["response_mask"].shape[1])
    return config.model_copy(update={"loss_scale_factor": config.loss_scale_factor or width})


def global_step(batch: DataProto) -> int:
    """The step of the run that a batch belongs to, 0 where its meta_info has none."""
    return int(batch.meta_info.get("global_steps", 0))


def run_updates(
    engine: TrainEngine, parts: LossParts, *, outputs: Sequence[Output], prefix: str, temperature: float = 1.0
) -> dict[str, float]:
    """One optimizer step per mini-batch with its loss; metrics are means over them.

    Adds `{prefix}/grad_norm` (over the steps applied), `{prefix}/lr` (the last) and `{prefix}/skipped_steps`: the
    number of steps skipped because their gradient norm was not finite.
    """
    metrics, reports = list[Mapping[str, float]](), list[StepReport]()
    for rows, loss_fn in parts:
        metrics.append(engine.forward_backward(rows, loss_fn, outputs=outputs, temperature=temperature))
        reports.append(engine.optim_step())
    norms = [report.grad_norm for report in reports if report.applied]
    return {
        **{name: mean_of([step[name] for step in metrics]) for name in metrics[0] if name != "loss"},
        f"{prefix}/grad_norm": mean_of(norms),
        f"{prefix}/lr": reports[-1].lr,
        f"{prefix}/skipped_steps": float(len(reports) - len(norms)),
    }


def mean_of(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN for an empty sequence."""
    return sum(values) / len(values) if values else math.nan


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

    The loss may couple rows, such as the two responses of a pair, which an engine may put into different micro-batches:
    the outputs of all rows are computed first, and the step uses the loss linearised at them, which has the same
    gradient however rows are split.
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
