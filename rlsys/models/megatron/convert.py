"""From Hugging Face tensors to the parameters of a Megatron rank, box by box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from rlsys.models.hf import TensorSource
from rlsys.models.megatron.rules import extents
from rlsys.types import Shard
from rlsys.utils.boxes import slices
from rlsys.utils.errors import CheckpointError


def load_shards(source: TensorSource, shards: Sequence[Shard], local_tensors: Mapping[str, Tensor]) -> None:
    """Fill a rank's tensors, in place and in their own dtype, with the boxes of its shards.

    Only the rank's boxes are read. Elements no shard covers, padding of the vocabulary, become zero. CheckpointError,
    before anything is changed, unless the local tensors are exactly those of the shards and the source has their boxes.
    """
    _check_local(shards, local_tensors)
    _check_source(shards, source)
    by_local = defaultdict(list)
    for shard in shards:
        by_local[shard.local].append(shard)
    with torch.no_grad():
        for name, own in by_local.items():
            fill(local_tensors[name].detach(), own, source)


def fill(target: Tensor, shards: Sequence[Shard], source: TensorSource) -> None:
    """Fill one local tensor from its shards' boxes; what they do not cover becomes zero."""
    if sum(prod(shard.box.shape) for shard in shards) < target.numel():
        target.zero_()
    for shard in shards:
        box = shard.box
        target[slices(shard.local_start, box.shape)].copy_(source.read(box.tensor, box.start, box.shape))


def _check_local(shards: Sequence[Shard], local_tensors: Mapping[str, Tensor]) -> None:
    needed = extents(shards)
    lacking = sorted(needed.keys() - local_tensors.keys())
    unknown = sorted(local_tensors.keys() - needed.keys())
    small = [
        f"{name} is {tuple(local_tensors[name].shape)} and should hold {extent}"
        for name, extent in needed.items()
        if name in local_tensors and not _fits(extent, local_tensors[name].shape)
    ]
    parts = [
        f"the model lacks {len(lacking)} parameters of the table ({', '.join(lacking[:3])})" if lacking else "",
        f"the table lacks {len(unknown)} parameters of the model ({', '.join(unknown[:3])})" if unknown else "",
        f"{len(small)} shapes differ ({'; '.join(small[:3])})" if small else "",
    ]
    if any(parts):
        raise CheckpointError("; ".join(filter(None, parts)))


def _fits(extent: Sequence[int], shape: Sequence[int]) -> bool:
    """Padding is only at the end of the first dimension, and less than a row a part: other sizes are equal."""
    return len(extent) == len(shape) and extent[0] <= shape[0] and tuple(extent[1:]) == tuple(shape[1:])


def _check_source(shards: Sequence[Shard], source: TensorSource) -> None:
    names = set(source.names())
    missing = sorted({shard.box.tensor for shard in shards} - names)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors ({', '.join(missing[:3])})")
    shapes = {name: source.shape(name) for name in {shard.box.tensor for shard in shards}}
    for shard in shards:
        box, full = shard.box, shapes[shard.box.tensor]
        if len(box.shape) != len(full) or any(a + n > size for a, n, size in zip(box.start, box.shape, full)):
            raise CheckpointError(
                f"{box.tensor} is {tuple(full)} in the checkpoint, which has no {box.start}+{box.shape}"
            )
