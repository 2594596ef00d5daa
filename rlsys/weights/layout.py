"""Arithmetic on boxes of HF tensors, and what a set of layouts must satisfy.

A shard's local tensor may have more dimensions than its box: then the leading entries of `local_start` are indices (an
expert in a stack of experts), and the box is in the remaining dimensions.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.boxes import overlap, slices
from rlsys.utils.errors import WeightTransferError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type of each width in bytes."""


def num_elements(box: Box) -> int:
    """The number of elements in a box."""
    return prod(box.shape)


def whole_box(tensor: str, shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return Box(tensor, (0,) * len(shape), tuple(shape))


def whole_shard(tensor: str, shape: Sequence[int], local: str) -> Shard:
    """The shard that is a whole tensor, held in a local tensor of its own."""
    return Shard(whole_box(tensor, shape), local, (0,) * len(shape))


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that cover `a` without `b`, at most two for each dimension."""
    if (common := overlap(a.start, a.shape, b.start, b.shape)) is None:
        return [a]
    rest, start, shape = [], list(a.start), list(a.shape)
    for dim in range(len(shape)):
        low, high = common[0][dim], common[0][dim] + common[1][dim]
        for begin, stop in ((start[dim], low), (high, start[dim] + shape[dim])):
            if begin < stop:
                part_start, part_shape = start.copy(), shape.copy()
                part_start[dim], part_shape[dim] = begin, stop - begin
                rest.append(Box(a.tensor, tuple(part_start), tuple(part_shape)))
        start[dim], shape[dim] = low, high - low
    return rest


def subtract_all(boxes: Iterable[Box], taken: Box) -> list[Box]:
    """Disjoint boxes that cover `boxes` without `taken`."""
    return [rest for box in boxes for rest in subtract(box, taken)]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`; ValueError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{name}' is not the name of a torch dtype")
    return dtype


def element_bytes(dtype: str) -> int:
    """Bytes of one element of the dtype of this name; ValueError for anything else."""
    return dtype_of(dtype).itemsize


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """The device of a rank's tensors; the CPU where there are none."""
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def view_of(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The part of `tensor` of the given shape from `start`; extra leading entries of `start` are indices."""
    return tensor[slices(start, shape)]


def shard_view(tensors: Mapping[str, Tensor], shard: Shard) -> Tensor:
    """The elements of a shard in the local tensors; WeightTransferError when they do not exist."""
    tensor = tensors.get(shard.local)
    if tensor is None:
        raise WeightTransferError(f"the layout names a local tensor '{shard.local}' that does not exist")
    view = view_of(tensor, shard.local_start, shard.box.shape)
    if tuple(view.shape) != shard.box.shape:
        place = f"{shard.local_start} of '{shard.local}', which is {tuple(tensor.shape)}"
        raise WeightTransferError(f"the layout places {shard.box} at {place}")
    return view


def check_complete(layouts: Sequence[WeightLayout]) -> None:
    """WeightTransferError unless the rollout's ranks together hold every element of their tensors."""
    if missing := missing_boxes(layouts):
        raise WeightTransferError(f"no rollout rank holds {missing[0]}")


def missing_boxes(layouts: Sequence[WeightLayout]) -> list[Box]:
    """Boxes of the layouts' tensors that none of them holds."""
    missing = {name: [whole_box(name, shape)] for layout in layouts for name, shape in layout.full_shapes.items()}
    for box in (shard.box for layout in layouts for shard in layout.shards):
        missing[box.tensor] = subtract_all(missing[box.tensor], box)
    return [box for boxes in missing.values() for box in boxes if num_elements(box)]
