"""Checksums of boxes on a GPU: all boxes of one word size in one launch, read in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

import torch
from torch import Tensor

from rlsys.weights.checksum_cpu import MODULUS, BoxValues

LAUNCH_BYTES = 256 << 20


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


def row_blocks(values: Tensor, start: Sequence[int], full_shape: Sequence[int]) -> Iterator[RowBlock]:
    """A box as blocks of consecutive rows; its last dimension must be contiguous."""
    size = values.element_size()
    *outer, columns = [*zip(values.shape, values.stride(), start, full_shape, strict=True)] or [(1, 1, 0, 1)]
    rows, pitch, first, full = outer.pop() if outer else (1, columns[0], 0, 1)
    while outer and rows == full and outer[-1][1] == rows * pitch:
        more, _, begin, whole = outer.pop()
        rows, first, full = rows * more, begin * full, full * whole
    for index in product(*(range(dim[0]) for dim in outer)):
        row = 0
        for at, (_, _, begin, whole) in zip(index, outer, strict=True):
            row = row * whole + begin + at
        offset = sum(at * stride for at, (_, stride, _, _) in zip(index, outer, strict=True))
        yield RowBlock(
            address=values.data_ptr() + offset * size,
            rows=rows,
            width=columns[0] * size,
            pitch=pitch * size,
            first_row=row * full + first,
            first_column=columns[2] * size,
        )


@torch.no_grad()
def cuda_checksums(boxes: Iterable[BoxValues]) -> list[int]:
    """`box_checksums` of boxes on one GPU. Values made for this call are freed every LAUNCH_BYTES."""
    held, launched, num_bytes = list[BoxValues](), list[Tensor](), 0
    for values, start, full_shape in boxes:
        held.append((values if values.ndim == 0 or values.stride(-1) == 1 else values.contiguous(), start, full_shape))
        num_bytes += values.nbytes
        if num_bytes >= LAUNCH_BYTES:
            launched.append(PreparedCudaChecksums(held).launch())
            held, num_bytes = [], 0
    launched += [PreparedCudaChecksums(held).launch()] if held else []
    return [number % MODULUS for number in torch.cat(launched).tolist()]


class PreparedCudaChecksums:
    """Checksums of boxes that stay in place, whose last dimensions are contiguous; computed at every call."""

    def __init__(self, boxes: Sequence[BoxValues]) -> None:
        self.device, self.num_boxes = boxes[0][0].device, len(boxes)
        rows: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for number, (values, start, full_shape) in enumerate(boxes):
            for part in row_blocks(values, start, full_shape) if values.numel() else ():
                word = part.word_bytes
                width, pitch, column = part.width // word, part.pitch // word, part.first_column // word
                rows[word].append((part.address, part.rows * width, width, pitch, part.first_row, column, number))
        self._tables = [
            (word, max(row[1] for row in table), torch.tensor(table, dtype=torch.int64).to(self.device))
            for word, table in rows.items()
        ]

    def launch(self) -> Tensor:
        """Start to compute the checksums (N,) of the N boxes, int64, on their device."""
        from rlsys.weights import kernels

        sums = torch.zeros(self.num_boxes, dtype=torch.int64, device=self.device)
        for word_bytes, most_words, table in self._tables:
            kernels.sum_rows(table, sums, word_bytes=word_bytes, most_words=most_words)
        return sums

    def __call__(self) -> list[int]:
        return [number % MODULUS for number in self.launch().tolist()]
