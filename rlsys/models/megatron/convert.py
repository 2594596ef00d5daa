"""From Hugging Face tensors to the parameters of a Megatron rank, box by box."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlsys.models.hf import TensorSource, differing_tensors, fill_shards
from rlsys.models.megatron.rules import by_local, extents
from rlsys.types import Shard
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
            fill_shards(local_tensors[name].detach(), own, source)


def _fits(extent: Sequence[int], shape: Sequence[int]) -> bool:
    """Padding is only at the end of the first dimension, and less than a row a part: other sizes are equal."""
    return len(extent) == len(shape) and extent[0] <= shape[0] and tuple(extent[1:]) == tuple(shape[1:])
