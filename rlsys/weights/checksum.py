"""Checksums of tensors that can be computed shard by shard, for any sharding, and added up.

`rlsys.weights.checksum_cpu` defines what is summed. One pass over the memory; not cryptographic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from rlsys.weights.checksum_cpu import MODULUS, BoxValues, cpu_checksum


def box_checksum(values: Tensor, start: Sequence[int], full_shape: Sequence[int]) -> int:
    """The part of the checksum of a tensor of `full_shape` that its box `values` at `start` contributes."""
    return box_checksums([(values, start, full_shape)])[0]


def box_checksums(boxes: Iterable[BoxValues]) -> list[int]:
    """`box_checksum` of many boxes (values, start, full shape) of one device; on a GPU in few launches.

    Values are taken one after the other, so that a generator may produce them.
    """
    boxes = iter(boxes)
    first = next(boxes, None)
    if first is None:
        return []
    if first[0].is_cuda:
        from rlsys.weights.checksum_cuda import cuda_checksums

        return cuda_checksums(chain([first], boxes))
    return [cpu_checksum(*box) for box in chain([first], boxes)]


def prepared_checksums(boxes: Sequence[BoxValues]) -> Callable[[], list[int]]:
    """A function that computes the `box_checksums` of boxes that stay in place while their values change."""
    if not (
        boxes and boxes[0][0].is_cuda and all(values.ndim == 0 or values.stride(-1) == 1 for values, _, _ in boxes)
    ):
        return lambda: box_checksums(boxes)
    from rlsys.weights.checksum_cuda import PreparedCudaChecksums

    return PreparedCudaChecksums(boxes)


def tensor_checksum(tensor: Tensor) -> int:
    """The checksum of a whole tensor."""
    return box_checksum(tensor, (0,) * tensor.ndim, tensor.shape)


def add_checksums(parts: Sequence[int]) -> int:
    """The checksum of disjoint boxes from the checksum of each."""
    return sum(parts) % MODULUS


def digest(checksums: Mapping[str, int]) -> str:
    """One short text for the checksums of many tensors, independent of their order."""
    text = "\n".join(f"{name} {checksums[name]:016x}" for name in sorted(checksums))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
