"""Numbered elements back into boxes: where in a parameter which rectangular part of which tensor lies.

A parameter is split along the dimension in which it falls into the fewest groups of slabs that continue each other by a
constant step, again and again, until single elements with their steps are left: affine pieces. Each is then told as
boxes of its tensor with one stride in the parameter for each dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]
Found = tuple[int, Shape, Shape, "Strided"]
"""Number of the tensor, start and shape of the box, its place."""


class NotBoxes(Exception):
    """The numbers cannot be told as few enough boxes."""


@dataclass(frozen=True)
class Strided:
    """A view of a local tensor: strides in memory, offset in elements from the tensor's first."""

    shape: Shape
    stride: Shape
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    def plain_in(self, tensor: Tensor, box_dims: int) -> Shape | None:
        """Where the view starts if it is a plain part of the tensor, in its last dimensions and their order."""
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


@dataclass(frozen=True)
class _Unit:
    """`extent` elements, each `step` further in the tensor and `stride` further in the parameter."""

    step: int
    extent: int
    stride: int


def boxes_in(
    numbers: Tensor, strides: Sequence[int], bases: Tensor, shapes: Sequence[Shape], *, max_boxes: int
) -> list[Found]:
    """The boxes of numbered tensors in a parameter of numbers (-1 for none) with these strides in memory.

    Elements of tensor t have the numbers from `bases[t]`, row-major. NotBoxes if there are more than `max_boxes`.
    """
    if numbers.ndim == 0:
        numbers, strides = numbers.reshape(1), (1,)
    which = torch.searchsorted(bases, numbers.contiguous(), right=True, out_int32=True) - 1
    found: list[Found] = []
    for tensor, number, offset, units in _pieces(numbers, which, list(strides), 0, [], max_boxes):
        for start, shape, place in _boxes_of(number - int(bases[tensor]), offset, units, shapes[tensor]):
            found.append((tensor, start, shape, place))
            if len(found) > max_boxes:
                raise NotBoxes(f"more than {max_boxes} boxes")
    return found


def _pieces(
    numbers: Tensor, which: Tensor, strides: list[int], offset: int, units: list[_Unit], most: int
) -> Iterator[tuple[int, int, int, list[_Unit]]]:
    """(tensor, number of its first element, offset, units) of the affine pieces of a region."""
    if numbers.ndim == 0:
        if which >= 0:
            yield int(which), int(numbers), offset, units
        return
    by_dim = [_groups(numbers, which, dim) for dim in range(numbers.ndim)]
    dim = min(range(numbers.ndim), key=lambda d: (len(by_dim[d]), -d))
    if len(by_dim[dim]) > most:
        raise NotBoxes(f"more than {most} boxes")
    rest = strides[:dim] + strides[dim + 1 :]
    for start, extent, step in by_dim[dim]:
        unit = [_Unit(step, extent, strides[dim])] if extent > 1 else []
        region = numbers.select(dim, start), which.select(dim, start)
        yield from _pieces(*region, rest, offset + start * strides[dim], units + unit, most)


def _groups(numbers: Tensor, which: Tensor, dim: int) -> list[tuple[int, int, int]]:
    """(start, extent, step) of runs of slabs along a dimension, each the one before plus a constant; no empty ones."""
    here = numbers.movedim(dim, 0).reshape(numbers.shape[dim], -1)
    kind = which.movedim(dim, 0).reshape(numbers.shape[dim], -1)
    some = (kind >= 0).any(1).tolist()
    change, there = here[1:] - here[:-1], kind[1:] >= 0
    ends = torch.iinfo(change.dtype)
    low = torch.where(there, change, ends.max).amin(1)
    high = torch.where(there, change, ends.min).amax(1)
    regular = ((kind[1:] == kind[:-1]).all(1) & (low == high)).tolist()
    steps = low.tolist()
    groups, at, size = list[tuple[int, int, int]](), 0, numbers.shape[dim]
    while at < size:
        end = at + 1
        if some[at] and end < size and regular[at]:
            while end < size and regular[end - 1] and steps[end - 1] == steps[at]:
                end += 1
        if some[at]:
            groups.append((at, end - at, steps[at] if end - at > 1 else 0))
        at = end
    return groups


def _boxes_of(first: int, offset: int, units: Sequence[_Unit], full: Shape) -> Iterator[tuple[Shape, Shape, Strided]]:
    """The boxes of an affine piece that starts at element `first` of a tensor of shape `full`."""
    steps = _logical_strides(full)
    start = [first // step % size for step, size in zip(steps, full, strict=True)]
    extents: list[list[_Unit]] = [[] for _ in full]
    loose: list[_Unit] = []
    waiting = sorted((unit for unit in units if unit.step > 0), key=lambda unit: (unit.step, unit.extent))
    loose += [unit for unit in units if unit.step <= 0]
    while waiting:
        unit = waiting.pop(0)
        fit = _dim_for(unit, steps, full, extents, start)
        if fit is None:
            loose.append(unit)
            continue
        dim, room = fit
        taken = min(unit.extent, room)
        if taken < unit.extent and (unit.extent % taken or start[dim] or _extent(extents[dim]) * taken != full[dim]):
            loose.append(unit)
            continue
        extents[dim].append(_Unit(unit.step, taken, unit.stride))
        if taken < unit.extent:
            waiting.insert(0, _Unit(unit.step * taken, unit.extent // taken, unit.stride * taken))
    outer = [*loose]
    shape, stride = [], []
    for chain in extents:
        n, step, rest = _joined(chain)
        shape.append(n)
        stride.append(step)
        outer += rest
    for index in product(*(range(unit.extent) for unit in outer)):
        number = first + sum(i * unit.step for i, unit in zip(index, outer, strict=True))
        at = offset + sum(i * unit.stride for i, unit in zip(index, outer, strict=True))
        begin = tuple(number // step % size for step, size in zip(steps, full, strict=True))
        if any(b + n > size for b, n, size in zip(begin, shape, full, strict=True)):
            raise NotBoxes("elements in an order that is no box")
        yield begin, tuple(shape), Strided(tuple(shape), tuple(stride), at)


def _dim_for(
    unit: _Unit, steps: Shape, full: Shape, extents: Sequence[list[_Unit]], start: Sequence[int]
) -> tuple[int, int] | None:
    """The dimension that a unit continues, and how many elements of the unit it has room for."""
    for dim in reversed(range(len(full))):
        have = _extent(extents[dim])
        if full[dim] > 1 and unit.step == steps[dim] * have and have < full[dim] - start[dim]:
            return dim, (full[dim] - start[dim]) // have
    return None


def _extent(chain: Sequence[_Unit]) -> int:
    return prod(unit.extent for unit in chain)


def _joined(chain: Sequence[_Unit]) -> tuple[int, int, list[_Unit]]:
    """Extent and stride of the inner units that are one stretch in the parameter, and the outer ones that are not."""
    if not chain:
        return 1, 1, []
    n, stride = chain[0].extent, chain[0].stride
    for number, unit in enumerate(chain[1:], start=1):
        if unit.stride != stride * n:
            return n, stride, list(chain[number:])
        n *= unit.extent
    return n, stride, []


def _logical_strides(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
