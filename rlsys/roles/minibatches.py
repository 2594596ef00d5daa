"""How a rank goes through its rows: epochs of mini-batches in an order that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlsys.protocol import DataProto


def mini_batches(
    batch: DataProto, *, rows: int, epochs: int, shuffle: bool, seed: int, step: int
) -> Iterator[DataProto]:
    """Contiguous mini-batches of `rows`; with `shuffle` the rows are permuted by (seed, step, epoch) first.

    ValueError unless the rank's rows divide.
    """
    if len(batch) % rows:
        raise ValueError(f"{len(batch)} rows of a rank do not divide into mini-batches of {rows}")
    for epoch in range(epochs):
        order = torch.arange(len(batch))
        if shuffle:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + epoch)
            order = torch.randperm(len(batch), generator=generator)
        for start in range(0, len(batch), rows):
            yield batch.select_idxs(order[start : start + rows])


def mean_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over optimizer steps; counts named `*_steps` are added."""
    names = dict.fromkeys(name for step in steps for name in step)
    out = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        out[name] = sum(values) if name.endswith("_steps") else sum(values) / len(values)
    return out
