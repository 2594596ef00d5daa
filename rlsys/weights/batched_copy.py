"""Many copies that are repeated at every push, compiled once into a few large operations.

On a GPU copies are merged where they touch on both sides, and all of them are one or two launches over a table of
tiles; where dtypes differ or that kernel is not available, and on a CPU, they are grouped foreach copies.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

import torch
from torch import Tensor

from rlsys.weights.layout import BITS

TensorPair = tuple[Tensor, Tensor]
Tile = tuple[int, ...]
"""A row of the copy kernel's table: (from, to, words, words of a row, from's and to's pitch in words)."""
TILE_BYTES, MANY_TILES, PARTS = (1 << 15, 1 << 16, 1 << 17, 1 << 18), 1 << 16, 32
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StridedBytes:
    """`rows` rows of `width` bytes from address `source` to `target`, each a pitch apart."""

    source: int
    target: int
    rows: int
    width: int
    source_pitch: int
    target_pitch: int


class BatchedCopy:
    """Copies from the second tensor of each pair into the first; all destinations are on one device."""

    def __init__(self, pairs: Sequence[TensorPair], *, use_kernel: bool = True) -> None:
        """`use_kernel`: on a GPU, if it works there. Dtypes may differ."""
        self.pairs = [(target.detach(), source.detach()) for target, source in pairs if target.numel()]
        self.uses_kernel = use_kernel and bool(self.pairs) and self.pairs[0][0].is_cuda
        self.num_bytes = sum(target.numel() * target.element_size() for target, _ in self.pairs)
        self._tables: list[tuple[Tensor, int, bool]] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        if self.uses_kernel:
            self._compile()
        if not self.uses_kernel:
            self._group(self.pairs)

    @torch.no_grad()
    def run(self) -> None:
        """Issue all copies; on a GPU they are done when the current stream has been waited for."""
        for table, word_bytes, pitched in self._tables:
            self._copy_tiles(table, word_bytes=word_bytes, pitched=pitched)
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _group(self, pairs: Sequence[TensorPair]) -> None:
        groups: dict[tuple, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for target, source in pairs:
            plain = target.is_contiguous() and source.is_contiguous()
            if target.dtype == source.dtype:
                target, source = bits_of(target), bits_of(source)
            targets, sources = groups[target.dtype, source.dtype, source.device, plain]
            targets.append(target)
            sources.append(source)
        self._groups = list(groups.values())

    def _compile(self) -> None:
        same = [(t, s) for t, s in self.pairs if t.dtype == s.dtype and s.is_cuda]
        self._group([(t, s) for t, s in self.pairs if not (t.dtype == s.dtype and s.is_cuda)])
        self._tables = [
            (torch.tensor(rows, dtype=torch.int64, device=self.pairs[0][0].device), word_bytes, pitched)
            for (word_bytes, pitched), rows in tile_tables(same).items()
        ]
        try:
            from rlsys.weights.kernels import copy_tiles

            self._copy_tiles = copy_tiles
            for table, word_bytes, pitched in self._tables:
                copy_tiles(table[:1], word_bytes=word_bytes, pitched=pitched)
        except Exception as error:  # triton missing, or no compiler for it: foreach serves too
            log.warning("copying weights with foreach, because the copy kernel does not work here: %s", error)
            self.uses_kernel, self._tables = False, []


def tile_tables(pairs: Sequence[TensorPair], *, parts: int = PARTS) -> dict[tuple[int, bool], list[Tile]]:
    """The tiles of pairs of equal dtypes by launch, a (word bytes, pitched) each, in the order of their copies.

    In a launch so many equal parts of the memory take turns; with one part they follow one another.
    """
    num_bytes = sum(target.nbytes for target, _ in pairs)
    tile_bytes = next((size for size in TILE_BYTES if num_bytes <= size * MANY_TILES), TILE_BYTES[-1])
    tiles: dict[tuple[int, bool], list[Tile]] = defaultdict(list)
    for block in merge_touching([block for pair in pairs for block in strided_bytes(*pair)]):
        for word_bytes, pitched, tile in tiles_of(block, tile_bytes):
            tiles[word_bytes, pitched].append(tile)
    return {launch: spread(rows, parts) for launch, rows in sorted(tiles.items())}


def spread(tiles: Sequence[Tile], parts: int) -> list[Tile]:
    """Tiles of all parts of the memory in turns: those that another GPU sends, slowly, beside those of this one."""
    each = -(-len(tiles) // parts)
    return [tile for at in range(each) for tile in tiles[at::each]]


def bits_of(tensor: Tensor) -> Tensor:
    """The tensor as integers of its width: foreach copies of floats on a GPU do not keep the payload of a NaN."""
    return tensor.view(BITS[tensor.element_size()]) if tensor.element_size() in BITS else tensor


def strided_bytes(target: Tensor, source: Tensor) -> Iterator[StridedBytes]:
    """The bytes of a pair of equal dtype and shape as contiguous rows."""
    itemsize = target.element_size()
    dims = [dim for dim in zip(target.shape, target.stride(), source.stride(), strict=True) if dim[0] > 1]
    width = 1
    while dims and dims[-1][1] == dims[-1][2] == width:
        width *= dims.pop()[0]
    rows, target_pitch, source_pitch = dims.pop() if dims else (1, width, width)
    while dims and dims[-1][1:] == (rows * target_pitch, rows * source_pitch):
        rows *= dims.pop()[0]
    target_base, source_base = target.data_ptr(), source.data_ptr()
    for index in product(*(range(size) for size, _, _ in dims)):
        to_at = target_base + itemsize * sum(at * stride for at, (_, stride, _) in zip(index, dims, strict=True))
        from_at = source_base + itemsize * sum(at * stride for at, (_, _, stride) in zip(index, dims, strict=True))
        yield StridedBytes(from_at, to_at, rows, width * itemsize, source_pitch * itemsize, target_pitch * itemsize)


def merge_touching(blocks: Sequence[StridedBytes]) -> list[StridedBytes]:
    """The same bytes, with single rows merged where they touch on both sides."""
    merged: list[StridedBytes] = []
    for block in sorted(blocks, key=lambda block: block.target):
        last = merged[-1] if merged and merged[-1].rows == block.rows == 1 else None
        if last and (last.target + last.width, last.source + last.width) == (block.target, block.source):
            merged[-1] = StridedBytes(last.source, last.target, 1, (n := last.width + block.width), n, n)
        else:
            merged.append(block)
    return merged


def tiles_of(block: StridedBytes, tile_bytes: int) -> Iterator[tuple[int, bool, Tile]]:
    """(word bytes, pitched, tile) of each tile of some rows."""
    if block.rows == 1:
        aligned = not (block.source % 16 or block.target % 16)
        word = 8 if aligned and not block.width % 8 else gcd(8, block.source, block.target, block.width)
        for at in range(0, block.width, tile_bytes):
            n = min(tile_bytes, block.width - at) // word
            yield word, not aligned, (block.source + at, block.target + at, n, n, n, n)
        return
    word = gcd(8, block.source, block.target, block.width, block.source_pitch, block.target_pitch)
    width, step = block.width // word, max(1, tile_bytes // block.width)
    for row in range(0, block.rows, step):
        n = min(step, block.rows - row)
        source, target = block.source + row * block.source_pitch, block.target + row * block.target_pitch
        yield word, True, (source, target, n * width, width, block.source_pitch // word, block.target_pitch // word)
