"""Checksums of tensors that can be computed shard by shard, whatever the shards, and added up.

`rlsys.weights.checksum_cpu` says what is summed. One pass over the memory; no defence against intent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from rlsys.weights.checksum_cpu import MODULUS, Held, sum_on_cpu


def box_checksum(values: Tensor, start: Sequence[int], full_shape: Sequence[int]) -> int:
    """The part of the checksum of a tensor of `full_shape` that its box `values` at `start` contributes."""
    return box_checksums([(values, start, full_shape)])[0]


def box_checksums(boxes: Iterable[Held]) -> list[int]:
    """`box_checksum` of many boxes (values, start, full shape) of one device; on a GPU in few launches.

    Values are taken one after the other, so that a generator may make them.
    """
    boxes = iter(boxes)
    first = next(boxes, None)
    if first is None:
        return []
    if first[0].is_cuda:
        from rlsys.weights.checksum_cuda import sums_on_gpu

        return sums_on_gpu(chain([first], boxes))
    return [sum_on_cpu(*box) for box in chain([first], boxes)]


def prepared_checksums(boxes: Sequence[Held]) -> Callable[[], list[int]]:
    """What gives the `box_checksums` of boxes that stay where they are, whatever is written there: prepared once."""
    if not (
        boxes and boxes[0][0].is_cuda and all(values.ndim == 0 or values.stride(-1) == 1 for values, _, _ in boxes)
    ):
        return lambda: box_checksums(boxes)
    from rlsys.weights.checksum_cuda import GpuSums

    return GpuSums(boxes)


def add_up(parts: Sequence[int]) -> int:
    """The checksum of disjoint boxes that were summed apart."""
    return sum(parts) % MODULUS


def digest(sums: Mapping[str, int]) -> str:
    """One short text for the checksums of many tensors, independent of their order."""
    text = "\n".join(f"{name} {sums[name]:016x}" for name in sorted(sums))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
