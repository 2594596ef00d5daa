"""Checksums of tensors that can be computed shard by shard, for any sharding, and added up.

`rlsys.weights.checksum_cpu` defines what is summed. On a GPU all boxes of one word size are one launch, read in place.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from rlsys.weights.checksum_cpu import MODULUS, BoxValues, cpu_checksum

LAUNCH_BYTES = 256 << 20


def box_checksum(values: Tensor, start: Sequence[int], full_shape: Sequence[int]) -> int:
    """The part of the checksum of a tensor of `full_shape` that its box `values` at `start` contributes."""
    return box_checksums([(values, start, full_shape)])[0]


def box_checksums(boxes: Iterable[BoxValues]) -> list[int]:
    """`box_checksum` of many boxes (values, start, full shape) of one device; on a GPU in few launches.

    Values are taken one after the other, so that a generator may produce them.
    """
    boxes = iter(boxes)
    first = [*islice(boxes, 1)]
    boxes = chain(first, boxes)
    return cuda_checksums(boxes) if first and first[0][0].is_cuda else [cpu_checksum(*box) for box in boxes]


def prepared_checksums(boxes: Sequence[BoxValues], dtypes: Sequence[torch.dtype]) -> Callable[[], list[int]]:
    """A function that computes the `box_checksums` of boxes, each cast to its dtype, that stay in place while their
    values change."""
    if boxes and boxes[0][0].is_cuda and all(map(_is_readable, boxes, dtypes)):
        return PreparedCudaChecksums(boxes, dtypes)
    return lambda: box_checksums((box[0].to(dtype), *box[1:]) for box, dtype in zip(boxes, dtypes, strict=True))


def _is_readable(box: BoxValues, dtype: torch.dtype) -> bool:
    """Whether a kernel reads a box in place, and casts it where its dtype is another."""
    values, *_ = box
    is_cast = values.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)
    return (values.dtype == dtype or is_cast) and (values.ndim == 0 or values.stride(-1) == 1)


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


@dataclass(frozen=True)
class RowBlock:
    """Equally spaced rows in memory, and their first row and column in the whole tensor; all but rows in bytes."""

    address: int
    rows: int
    width: int
    pitch: int
    first_row: int
    first_column: int

    @property
    def word_bytes(self) -> int:
        """The widest word that divides it."""
        return gcd(8, self.address, self.width, self.pitch, self.first_column)


class _Dim(NamedTuple):
    """A dimension of a box: its size and stride in memory, and where it starts in the `full` one of the tensor."""

    size: int
    stride: int
    start: int
    full: int


def row_blocks(values: Tensor, start: Sequence[int], full_shape: Sequence[int]) -> Iterator[RowBlock]:
    """A box as blocks of consecutive rows; its last dimension must be contiguous."""
    itemsize = values.element_size()
    outer = [_Dim(*dim) for dim in zip(values.shape, values.stride(), start, full_shape, strict=True)]
    columns = outer.pop() if outer else _Dim(1, 1, 0, 1)
    rows = outer.pop() if outer else _Dim(1, columns.size, 0, 1)
    while outer and rows.size == rows.full and outer[-1].stride == rows.size * rows.stride:
        dim = outer.pop()
        rows = _Dim(rows.size * dim.size, rows.stride, dim.start * rows.full, dim.full * rows.full)
    for index in product(*(range(dim.size) for dim in outer)):
        row = offset = 0
        for at, dim in zip(index, outer, strict=True):
            row = row * dim.full + dim.start + at
            offset += at * dim.stride
        address, first_row = values.data_ptr() + offset * itemsize, row * rows.full + rows.start
        width, pitch, first_column = (number * itemsize for number in (columns.size, rows.stride, columns.start))
        yield RowBlock(address, rows.size, width, pitch, first_row, first_column)


@torch.no_grad()
def cuda_checksums(boxes: Iterable[BoxValues]) -> list[int]:
    """`box_checksums` of boxes on one GPU. Values made for this call are freed every LAUNCH_BYTES."""
    held, launched, num_bytes = list[BoxValues](), list[Tensor](), 0
    for values, start, full_shape in boxes:
        held.append((values if values.ndim == 0 or values.stride(-1) == 1 else values.contiguous(), start, full_shape))
        num_bytes += values.nbytes
        if num_bytes >= LAUNCH_BYTES:
            launched.append(_launched(held))
            held, num_bytes = [], 0
    launched += [_launched(held)] if held else []
    return [number % MODULUS for number in torch.cat(launched).tolist()]


def _launched(boxes: Sequence[BoxValues]) -> Tensor:
    return PreparedCudaChecksums(boxes, [values.dtype for values, _, _ in boxes]).launch()


class PreparedCudaChecksums:
    """Checksums of boxes that stay in place, whose last dimensions are contiguous; computed at every call.

    Those of float32 may be cast to a dtype of two bytes.
    """

    def __init__(self, boxes: Sequence[BoxValues], dtypes: Sequence[torch.dtype]) -> None:
        from rlsys.weights import kernels

        self.device, self.num_boxes = boxes[0][0].device, len(boxes)
        pieces: dict[tuple[int, torch.dtype | None, int], list[tuple[int, ...]]] = defaultdict(list)
        for number, ((values, start, full_shape), dtype) in enumerate(zip(boxes, dtypes, strict=True)):
            cast = None if values.dtype == dtype else dtype
            for part in row_blocks(values, start, full_shape) if values.numel() else ():
                word = values.element_size() if cast else part.word_bytes
                aligned = gcd(16, part.address, part.width, part.pitch) == 16
                width, pitch, column = part.width // word, part.pitch // word, part.first_column // word
                piece = (part.address, part.rows, width, pitch, part.first_row, column, number)
                pieces[word, cast, 16 // word if aligned and word > 2 else 1].append(piece)
        self._tables = [
            (*kind, *(part.to(self.device) for part in kernels.cut_tiles(group, kind[-1])))
            for kind, group in pieces.items()
        ]

    def launch(self) -> Tensor:
        """Start to compute the checksums (N,) of the N boxes, int64, on their device."""
        from rlsys.weights import kernels

        sums = torch.zeros(self.num_boxes, dtype=torch.int64, device=self.device)
        for word_bytes, cast, lane_words, table, owners in self._tables:
            kernels.sum_tiles(table, owners, sums, word_bytes=word_bytes, cast=cast, lane_words=lane_words)
        return sums

    def __call__(self) -> list[int]:
        return [number % MODULUS for number in self.launch().tolist()]
