"""Numbered elements decoded into boxes: which rectangular part of which tensor is where in a parameter.

A parameter is split along the dimension in which it falls into the fewest runs of slabs that continue each other by a
constant step, recursively, until single elements with their steps are left: affine regions. Each is then expressed as
boxes of its tensor with one stride in the parameter for each dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rlsys.weights.layout import row_major_strides

Dims = tuple[int, ...]
CHUNK = 1 << 24
"""Elements of a tensor that are computed at a time: what is computed needs several times their memory."""


class NotBoxesError(Exception):
    """The numbers cannot be expressed as few enough boxes."""


@dataclass(frozen=True)
class StridedView:
    """A view of a local tensor: strides in memory, offset in elements from the tensor's first."""

    shape: Dims
    stride: Dims
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a local tensor."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    def slice_start(self, tensor: Tensor, box_dims: int) -> Dims | None:
        """The start of the view if it is a plain slice of the tensor's last dimensions in their order, else None."""
        extra = tensor.ndim - box_dims
        own = tensor.stride()[extra:] if extra >= 0 else ()
        if extra < 0 or any(n > 1 and a != b for n, a, b in zip(self.shape, self.stride, own, strict=True)):
            return None
        start, left = [0] * tensor.ndim, self.offset
        for dim in sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d)):
            if tensor.shape[dim] > 1:
                start[dim], left = divmod(left, tensor.stride(dim))
        ends = zip(start[extra:], self.shape, tensor.shape[extra:], strict=True)
        return tuple(start) if not left and all(at + n <= size for at, n, size in ends) else None


class _LoopDim(NamedTuple):
    """`extent` elements, each `step` behind the one before it in the tensor and `stride` behind it in the parameter."""

    step: int
    extent: int
    stride: int


def decode_boxes(
    numbers: Tensor, strides: Sequence[int], bases: Tensor, shapes: Sequence[Dims], *, max_boxes: int
) -> list[tuple[int, Dims, StridedView]]:
    """The boxes of numbered tensors in a parameter, as (tensor, start of the box, view of the parameter in its shape).

    `numbers` are the parameter's elements, -1 for none, `strides` its strides in memory. Elements of tensor t have the
    numbers from `bases[t]` on, row-major. NotBoxesError if there are more than `max_boxes`.
    """
    if numbers.ndim == 0:
        numbers, strides = numbers.reshape(1), (1,)
    which = torch.searchsorted(bases, numbers.contiguous(), right=True, out_int32=True).sub_(1)
    boxes = list[tuple[int, Dims, StridedView]]()
    for tensor, number, offset, loops in _affine_regions(numbers, which, list(strides), 0, [], max_boxes):
        for start, view in _boxes_of(number - int(bases[tensor]), offset, loops, shapes[tensor]):
            boxes.append((tensor, start, view))
            if len(boxes) > max_boxes:
                raise NotBoxesError(f"more than {max_boxes} boxes")
    return boxes


def _affine_regions(
    numbers: Tensor, which: Tensor, strides: list[int], offset: int, loops: list[_LoopDim], most: int
) -> Iterator[tuple[int, int, int, list[_LoopDim]]]:
    """(tensor, number of its first element, offset, loops) of the affine regions of a region.

    `which` has the tensor of each element; `offset` and `loops` are those of the region in the parameter.
    """
    if numbers.ndim == 0:
        if which >= 0:
            yield int(which), int(numbers), offset, loops
        return
    runs_by_dim = [_runs(numbers, which, dim) for dim in range(numbers.ndim)]
    dim = min(range(numbers.ndim), key=lambda d: (len(runs_by_dim[d]), -d))
    if len(runs_by_dim[dim]) > most:
        raise NotBoxesError(f"more than {most} boxes")
    rest = strides[:dim] + strides[dim + 1 :]
    for start, extent, step in runs_by_dim[dim]:
        loop = [_LoopDim(step, extent, strides[dim])] if extent > 1 else []
        region = numbers.select(dim, start), which.select(dim, start)
        yield from _affine_regions(*region, rest, offset + start * strides[dim], loops + loop, most)


def _runs(numbers: Tensor, which: Tensor, dim: int) -> list[tuple[int, int, int]]:
    """(start, extent, step) of the runs of slabs along a dimension; slabs without numbers are in none.

    In a run each slab is the one before plus a constant, the step.
    """
    # For slab n: whether it has numbers, whether slab n + 1 is it plus a constant, and that constant.
    size, is_used, regular, steps = numbers.shape[dim], list[bool](), list[bool](), list[int]()
    several = max(1, CHUNK // (width := numbers.numel() // size))
    for first in range(0, size, several):
        part, owner = (t.movedim(dim, 0)[first : first + several + 1].reshape(-1, width) for t in (numbers, which))
        change, used = part[1:] - part[:-1], owner[1:] >= 0
        ends = torch.iinfo(change.dtype)
        low = torch.where(used, change, ends.max).amin(1)
        high = torch.where(used, change, ends.min).amax(1)
        is_used += (owner[:several] >= 0).any(1).tolist()
        regular += ((owner[1:] == owner[:-1]).all(1) & (low == high)).tolist()
        steps += low.tolist()
    runs, at = list[tuple[int, int, int]](), 0
    while at < size:
        end = at + 1
        while end < size and regular[end - 1] and steps[end - 1] == steps[at]:
            end += 1
        if is_used[at]:
            runs.append((at, end - at, steps[at] if end - at > 1 else 0))
        at = end
    return runs


def _boxes_of(first: int, offset: int, loops: Sequence[_LoopDim], full: Dims) -> Iterator[tuple[Dims, StridedView]]:
    """The boxes of an affine region that starts at element `first` of a tensor of shape `full`.

    A loop whose step continues a dimension of the tensor becomes (a part of) that dimension of the box, from the
    smallest step on; what is left of it loops on in the next dimension. For every index of the other, `outer` loops
    there is one box.
    """
    steps = row_major_strides(full)
    start = [first // step % size for step, size in zip(steps, full, strict=True)]
    extents: list[list[_LoopDim]] = [[] for _ in full]
    waiting = sorted((loop for loop in loops if loop.step > 0), key=lambda loop: (loop.step, loop.extent))
    outer = [loop for loop in loops if loop.step <= 0]
    while waiting:
        loop = waiting.pop(0)
        fit = _dim_for(loop, steps, full, extents, start)
        if fit is None:
            outer.append(loop)
            continue
        dim, room = fit
        taken = min(loop.extent, room)
        if taken < loop.extent and (loop.extent % taken or start[dim] or _extent(extents[dim]) * taken != full[dim]):
            outer.append(loop)
            continue
        extents[dim].append(_LoopDim(loop.step, taken, loop.stride))
        if taken < loop.extent:
            waiting.insert(0, _LoopDim(loop.step * taken, loop.extent // taken, loop.stride * taken))
    shape, stride = [], []
    for chain in extents:
        n, step, rest = _joined(chain)
        shape.append(n)
        stride.append(step)
        outer += rest
    for index in product(*(range(loop.extent) for loop in outer)):
        number = first + sum(i * loop.step for i, loop in zip(index, outer, strict=True))
        at = offset + sum(i * loop.stride for i, loop in zip(index, outer, strict=True))
        begin = tuple(number // step % size for step, size in zip(steps, full, strict=True))
        if any(b + n > size for b, n, size in zip(begin, shape, full, strict=True)):
            raise NotBoxesError("elements in an order that is not a box")
        yield begin, StridedView(tuple(shape), tuple(stride), at)


def _dim_for(
    loop: _LoopDim, steps: Dims, full: Dims, extents: Sequence[list[_LoopDim]], start: Sequence[int]
) -> tuple[int, int] | None:
    """The dimension that a loop continues, and how many times it fits in there; None if there is no such dimension."""
    for dim in reversed(range(len(full))):
        have = _extent(extents[dim])
        if full[dim] > 1 and loop.step == steps[dim] * have and have < full[dim] - start[dim]:
            return dim, (full[dim] - start[dim]) // have
    return None


def _extent(chain: Sequence[_LoopDim]) -> int:
    return prod(loop.extent for loop in chain)


def _joined(chain: Sequence[_LoopDim]) -> tuple[int, int, list[_LoopDim]]:
    """Extent and stride of the inner loops that are contiguous in the parameter, and the outer ones that are not."""
    if not chain:
        return 1, 1, []
    n, stride = chain[0].extent, chain[0].stride
    for number, loop in enumerate(chain[1:], start=1):
        if loop.stride != stride * n:
            return n, stride, list(chain[number:])
        n *= loop.extent
    return n, stride, []
