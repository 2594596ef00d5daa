"""Updates of every role: mini-batches in a fixed order, one optimizer step each."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlsys.config.schema.actor import ActorConfig, CriticConfig
from rlsys.interfaces import LossFn, Output, TrainEngine
from rlsys.protocol import DataProto
from rlsys.types import StepReport


@dataclass(frozen=True)
class MiniBatch:
    """Rows of this rank for one optimizer step, and the number of that step within the update."""

    rows: DataProto
    index: int


def row_order(num_rows: int, *, seed: int, step: int, epoch: int) -> torch.Tensor:
    """A permutation of the rows that depends only on these numbers, so it is the same on every rank."""
    (state,) = np.random.SeedSequence([seed, step, epoch]).generate_state(1, np.uint64)
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int(state) >> 1))


def mini_batches(
    batch: DataProto,
    *,
    num_rows: int | None = None,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    step: int = 0,
) -> Iterator[MiniBatch]:
    """Contiguous parts of `num_rows` rows (None: all of them), for each of `epochs` passes over the batch.

    With `shuffle` every pass has its own order, drawn from `seed`, the global `step` and the epoch.
    """
    index = 0
    for epoch in range(epochs):
        rows = batch
        if shuffle:
            rows = batch.select_idxs(row_order(len(batch), seed=seed, step=step, epoch=epoch))
        for part in rows.split(num_rows or len(batch)):
            yield MiniBatch(part, index)
            index += 1


def ppo_mini_batches(
    batch: DataProto, config: ActorConfig | CriticConfig, *, rollout_n: int, dp_size: int
) -> Iterator[MiniBatch]:
    """This rank's share of each mini-batch: `ppo_mini_batch_size` prompts of `rollout_n` answers by `dp_size` ranks."""
    num_rows = config.ppo_mini_batch_size * rollout_n * batch.meta_info.get("rows_per_episode", 1) // dp_size
    if num_rows < 1:
        raise ValueError(f"ppo_mini_batch_size={config.ppo_mini_batch_size} gives {dp_size} ranks no row each")
    return mini_batches(
        batch,
        num_rows=num_rows,
        epochs=config.ppo_epochs,
        shuffle=config.shuffle,
        seed=config.data_loader_seed,
        step=global_step(batch),
    )


def global_step(batch: DataProto) -> int:
    """The step of the run that a batch belongs to, 0 where its meta_info has none."""
    return int(batch.meta_info.get("global_steps", 0))


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

    Adds `{prefix}/grad_norm` (over the steps applied), `{prefix}/lr` (the last) and `{prefix}/skipped_steps`: the
    number of steps skipped because their gradient norm was not finite.
    """
    metrics: list[Mapping[str, float]] = []
    reports: list[StepReport] = []
    for part in parts:
        rows, loss_fn = make_loss(part)
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
