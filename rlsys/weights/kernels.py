"""One launch that carries out any number of copies on a GPU, between its own memory and any that it can read."""

from __future__ import annotations

import torch
import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

BLOCK = 2048
NUM_WARPS = 8


@triton.jit
def _copy_tiles(table, words: tl.constexpr, block: tl.constexpr, pitched: tl.constexpr):
    """A program copies one tile: (from, to, words, words of a row, from's and to's pitch in words)."""
    row = table + tl.program_id(0).to(tl.int64) * 6
    source = tl.load(row).to(tl.pointer_type(words))
    target = tl.load(row + 1).to(tl.pointer_type(words))
    count = tl.load(row + 2).to(tl.int32)
    lanes = tl.arange(0, block)
    if pitched:
        width = tl.load(row + 3).to(tl.int32)
        from_pitch = tl.load(row + 4)
        to_pitch = tl.load(row + 5)
        for at in range(0, count, block):
            lane = at + lanes
            line, column = lane // width, lane % width
            inside = lane < count
            value = tl.load(source + line * from_pitch + column, mask=inside)
            tl.store(target + line * to_pitch + column, value, mask=inside)
    else:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        whole = count // block * block
        for at in range(0, whole, block):
            tl.store(target + at + lanes, tl.load(source + at + lanes))
        rest = whole + lanes
        tl.store(target + rest, tl.load(source + rest, mask=rest < count), mask=rest < count)


def copy_tiles(table: Tensor, *, word_bytes: int, pitched: bool) -> None:
    """Copy all tiles of an int64 table (N, 6) on its device; not pitched tiles must start at multiples of 16 bytes."""
    words = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word_bytes]
    if len(table):
        with torch.cuda.device(table.device):
            _copy_tiles[(len(table),)](table, words, BLOCK, pitched, num_warps=NUM_WARPS)
