"""From Hugging Face tensors to the parameters of a Megatron rank, box by box."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from rlsys.models.hf import TensorSource, differing_tensors
from rlsys.models.megatron.rules import by_local, extents
from rlsys.types import Shard
from rlsys.utils.boxes import slices
from rlsys.utils.errors import CheckpointError


def load_shards(source: TensorSource, shards: Sequence[Shard], local_tensors: Mapping[str, Tensor]) -> None:
    """Fill a rank's tensors, in place and in their own dtype, with the boxes of its shards.

    Only the rank's boxes are read. Elements no shard covers, padding of the vocabulary, become zero. CheckpointError,
    before anything is changed, unless the local tensors are exactly those of the shards.
    """
    needed = extents(shards)
    there = {
        name: needed[name] if name in needed and _fits(needed[name], tensor.shape) else tuple(tensor.shape)
        for name, tensor in local_tensors.items()
    }
    if differences := differing_tensors(needed, there, whose="the table's"):
        raise CheckpointError(f"Megatron's model is not that of the family's table: {differences}")
    with torch.no_grad():
        for name, own in by_local(shards).items():
            fill(local_tensors[name].detach(), own, source)


def fill(target: Tensor, shards: Sequence[Shard], source: TensorSource) -> None:
    """Fill one local tensor from its shards' boxes; what they do not cover becomes zero."""
    if sum(prod(shard.box.shape) for shard in shards) < target.numel():
        target.zero_()
    for shard in shards:
        box = shard.box
        target[slices(shard.local_start, box.shape)].copy_(source[box.tensor].read(box.start, box.shape))


def _fits(extent: Sequence[int], shape: Sequence[int]) -> bool:
    """Padding is only at the end of the first dimension, and less than a row a part: other sizes are equal."""
    return len(extent) == len(shape) and extent[0] <= shape[0] and tuple(extent[1:]) == tuple(shape[1:])
