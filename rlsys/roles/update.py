"""How every role trains on a batch: mini-batches in a fixed order, one optimizer step each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlsys.interfaces import LossFn, Output, TrainEngine
from rlsys.protocol import DataProto
from rlsys.types import StepReport


@dataclass(frozen=True)
class UpdateSettings:
    """`mini_batch_rows` of this rank make one optimizer step (None: all of them); `epochs` passes over the batch."""

    mini_batch_rows: int | None = None
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or (self.mini_batch_rows is not None and self.mini_batch_rows < 1):
            raise ValueError(f"epochs and mini_batch_rows must be at least 1, got {self}")


@dataclass(frozen=True)
class MiniBatch:
    """Rows of this rank for one optimizer step, and which step of this update it is."""

    rows: DataProto
    index: int


def row_order(num_rows: int, *, seed: int, step: int, epoch: int) -> torch.Tensor:
    """A permutation of the rows that depends on these numbers alone, hence is the same on every rank."""
    (state,) = np.random.SeedSequence([seed, step, epoch]).generate_state(1, np.uint64)
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int(state) >> 1))


def mini_batches(batch: DataProto, settings: UpdateSettings, *, step: int = 0) -> Iterator[MiniBatch]:
    """Contiguous parts of the batch, `epochs` times, in a new order each if `shuffle`. `step` is the global step."""
    size = settings.mini_batch_rows or len(batch)
    index = 0
    for epoch in range(settings.epochs):
        rows = batch
        if settings.shuffle:
            rows = batch.select_idxs(row_order(len(batch), seed=settings.seed, step=step, epoch=epoch))
        for part in rows.split(size):
            yield MiniBatch(part, index)
            index += 1


def run_updates(
    engine: TrainEngine,
    parts: Iterator[MiniBatch],
    make_loss: Callable[[MiniBatch], tuple[DataProto, LossFn]],
    *,
    outputs: Sequence[Output],
    prefix: str,
    temperature: float = 1.0,
) -> dict[str, float]:
    """One optimizer step per mini-batch; metrics are means over the steps.

    Adds `{prefix}/grad_norm` (over the steps applied), `{prefix}/lr` (the last) and `{prefix}/skipped_steps`: how many
    were refused because their gradient norm was not finite.
    """
    metrics: list[Mapping[str, float]] = []
    reports: list[StepReport] = []
    for part in parts:
        rows, loss_fn = make_loss(part)
        metrics.append(engine.forward_backward(rows, loss_fn, outputs=outputs, temperature=temperature))
        reports.append(engine.optim_step())
    norms = [report.grad_norm for report in reports if report.applied]
    return {
        **{name: mean_of([found[name] for found in metrics]) for name in metrics[0] if name != "loss"},
        f"{prefix}/grad_norm": mean_of(norms),
        f"{prefix}/lr": reports[-1].lr,
        f"{prefix}/skipped_steps": float(len(reports) - len(norms)),
    }


def mean_of(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN for nothing."""
    return sum(values) / len(values) if values else math.nan
