"""Whole HF tensors from the local tensors of Megatron ranks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from rlsys.types import Shard
from rlsys.utils.boxes import slices
from rlsys.utils.errors import CheckpointError


class LocalTensors(Protocol):
    """Where a rank's local tensors are read from, by local name."""

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor: ...


def full_tensors(
    full_shapes: Mapping[str, Sequence[int]], ranks: Sequence[tuple[Sequence[Shard], LocalTensors]]
) -> Iterator[tuple[str, Tensor]]:
    """Whole HF tensors, one at a time in the order of `full_shapes`, from the ranks' local tensors.

    A box that several ranks hold is read from the first. CheckpointError for elements no rank holds.
    """
    holders: dict[str, dict[tuple[int, ...], tuple[Shard, LocalTensors]]] = defaultdict(dict)
    for shards, local in ranks:
        for shard in shards:
            holders[shard.box.tensor].setdefault((*shard.box.start, *shard.box.shape), (shard, local))
    for name, shape in full_shapes.items():
        yield name, _assembled(name, tuple(shape), [*holders[name].values()])


def _assembled(name: str, shape: tuple[int, ...], boxes: Sequence[tuple[Shard, LocalTensors]]) -> Tensor:
    held = sum(prod(shard.box.shape) for shard, _ in boxes)
    if held != prod(shape):
        raise CheckpointError(f"{name}: the ranks hold {held} of its {prod(shape)} elements")
    full: Tensor | None = None
    for shard, local in boxes:
        part = local[shard.local].read(shard.local_start, shard.box.shape)
        if full is None:
            full = torch.empty(shape, dtype=part.dtype, device=part.device)
        if part.dtype != full.dtype:
            raise CheckpointError(f"{name} is {full.dtype} in one rank and {part.dtype} in another ({shard.local})")
        full[slices(shard.box.start, shard.box.shape)] = part
    assert full is not None
    return full
