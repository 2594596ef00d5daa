"""Kernels for many blocks of memory at once: copies between any memory a GPU can read, checksums, and FP8."""

from collections.abc import Sequence

import torch
import triton  # pyrefly: ignore
import triton.language as tl  # pyrefly: ignore
from torch import Tensor

from rlsys.models import quantized
from rlsys.weights import checksum_cpu

BLOCK = 2048
NUM_WARPS, QUANT_WARPS = 8, 4
SUM_LOADS, SUM_ROWS, SUM_WARPS = tl.constexpr(4), tl.constexpr(256), tl.constexpr(NUM_WARPS)
SUM_STAGES = tl.constexpr(3)
"""Rows that are on their way to shared memory while one is summed, and that one."""
SMALLEST, RECIPROCAL = tl.constexpr(quantized.SMALLEST), tl.constexpr(1 / quantized.LARGEST)
ROW_STREAM = tl.constexpr(checksum_cpu.ROW_STREAM)
WORD_STREAM = tl.constexpr(checksum_cpu.WORD_STREAM)
WORDS = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
CASTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What float32 is cast to inside a kernel."""


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


@triton.jit
def _odd(stream: tl.constexpr, number):
    """An odd weight of a number: the finaliser of SplitMix64, as in rlsys/weights/checksum_cpu.py."""
    x = number.to(tl.uint64) * 0x9E3779B97F4A7C15 + stream
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) | 1


@triton.jit
def _sum_tiles(table, owners, sums, given: tl.constexpr, cast: tl.constexpr, words: tl.constexpr, step: tl.constexpr):
    """A program sums a tile, a row a warp: weights of columns are made once, those of rows for SUM_LOADS loads each.

    What is `given` counts as the words that it becomes once it is `cast`; a thread loads `step` of them.
    """
    lanes: tl.constexpr = 32 * step
    per_word: tl.constexpr = 64 // words.primitive_bitwidth
    piece = table + tl.load(owners + tl.program_id(0)).to(tl.int64) * 8
    source = tl.multiple_of(tl.load(piece).to(tl.pointer_type(given)), step * given.primitive_bitwidth // 8)
    rows = tl.load(piece + 1).to(tl.int32)
    width = tl.multiple_of(tl.load(piece + 2).to(tl.int32), step)
    pitch = tl.multiple_of(tl.load(piece + 3), step)
    tile = tl.program_id(0) - tl.load(piece + 7).to(tl.int32)
    across = tl.cdiv(width, lanes * SUM_LOADS)
    column = tile % across * lanes * SUM_LOADS + tl.arange(0, lanes)
    weights = ()
    for load in tl.static_range(SUM_LOADS):
        place = tl.load(piece + 5) + column + load * lanes
        weights += (_odd(WORD_STREAM, place // per_word) << (place % per_word * (64 // per_word)).to(tl.uint64),)
    top = tile // across * SUM_ROWS
    total = tl.zeros((SUM_WARPS, lanes), tl.uint64)
    for at in tl.range(top, tl.minimum(top + SUM_ROWS, rows), SUM_WARPS, num_stages=SUM_STAGES):
        line = at + tl.arange(0, SUM_WARPS)
        start = source + line.to(tl.int64)[:, None] * pitch + column[None, :]
        values = ()
        for load in tl.static_range(SUM_LOADS):
            inside = (line < rows)[:, None] & (column + load * lanes < width)[None, :]
            values += (tl.load(start + load * lanes, mask=inside, other=0),)
        of_row = tl.zeros((SUM_WARPS, lanes), tl.uint64)
        for load in tl.static_range(SUM_LOADS):
            of_row += values[load].to(cast).to(words, bitcast=True).to(tl.uint64) * weights[load][None, :]
        total += of_row * _odd(ROW_STREAM, tl.load(piece + 4) + line)[:, None]
    tl.atomic_add(sums + tl.load(piece + 6), tl.sum(total).to(tl.int64, bitcast=True))


def cut_tiles(pieces: Sequence[Sequence[int]], lane_words: int) -> tuple[Tensor, Tensor]:
    """The arguments `table` (N, 8) and `owners` (T,) of `sum_tiles` for N pieces.

    A piece: (address, rows, words of a row, pitch, first row, first column, number of its sum); rows start and end at
    multiples of `lane_words`.
    """
    table = torch.tensor(pieces, dtype=torch.int64)
    counts = -(-table[:, 2] // (32 * lane_words * SUM_LOADS.value)) * -(-table[:, 1] // SUM_ROWS.value)
    owners = torch.repeat_interleave(torch.arange(len(table), dtype=torch.int32), counts)
    return torch.cat([table, (counts.cumsum(0) - counts)[:, None]], 1), owners


def sum_tiles(
    table: Tensor, owners: Tensor, sums: Tensor, *, word_bytes: int, cast: torch.dtype | None, lane_words: int
) -> None:
    """Add the checksum of each piece to its sum; with `cast` words are float32 elements that count as cast to it."""
    words = WORDS[cast.itemsize if cast else word_bytes]
    given, becomes = (tl.float32, CASTS[cast]) if cast else (words, words)
    with torch.cuda.device_of(table):
        _sum_tiles[(len(owners),)](table, owners, sums, given, becomes, words, lane_words, num_warps=NUM_WARPS)


@triton.jit
def _quantise_blocks(
    table, owners, whole, words: tl.constexpr, side: tl.constexpr, aligned: tl.constexpr, divides: tl.constexpr
):
    """A program raises the scale of a block to its largest magnitude, and divides the first `whole` blocks at once.

    With `divides` it divides one of the others, by the scale that ranks agreed on.
    """
    step: tl.constexpr = 16 if aligned else 1
    program = tl.program_id(0) + (whole if divides else 0)
    box = table + tl.load(owners + program) * 13
    block, across = program - tl.load(box + 1), tl.load(box + 2)
    values = tl.multiple_of(tl.load(box + 3).to(tl.pointer_type(words)), step)
    pitch = tl.multiple_of(tl.load(box + 4), step)
    columns = tl.multiple_of(tl.load(box + 7), step)
    left = tl.multiple_of(tl.load(box + 9), step)
    elements = tl.multiple_of(tl.load(box + 10).to(tl.pointer_type(tl.float8e4nv)), step)
    scale_at = tl.load(box + 11).to(tl.pointer_type(tl.float32)) + block // across * tl.load(box + 12) + block % across
    lanes = tl.arange(0, side)
    row = (block // across * side + lanes - tl.load(box + 8))[:, None]
    column = (block % across * side + lanes - left)[None, :]
    inside = (row >= 0) & (row < tl.load(box + 6)) & (column >= 0) & (column < columns)
    source = values + row * pitch + (column if aligned else column * tl.load(box + 5))
    value = tl.load(source, mask=inside, other=0).to(tl.bfloat16)
    if divides:
        scale = tl.load(scale_at)
    else:
        bits = value.to(tl.int16, bitcast=True) & 0x7FFF  # of magnitudes, which are ordered as integers too
        largest = tl.max(tl.max(bits, 1), 0).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
        tl.atomic_max(scale_at, largest, sem="relaxed")
        scale = tl.maximum(largest, SMALLEST) * RECIPROCAL  # as PyTorch divides by a number on a GPU
        inside = inside & (row < tl.where(program < whole, tl.load(box + 6), 0))
    quotient = value.to(tl.float32) * (1.0 / scale)  # rounded as PyTorch compiles a reciprocal: vLLM's division
    tl.store(elements + row * columns + column, quotient.to(tl.float8e4nv), mask=inside)


def quantise_blocks(
    table: Tensor, owners: Tensor, whole: int, dtype: torch.dtype, *, block: int, aligned: bool, divides: bool
) -> None:
    """One pass over the blocks of boxes, a row of `table` each (N, 13); `owners` is the box of every block, of `block`
    rows and columns.

    A row: (whether others share blocks, number of its first block, blocks across; address and two strides of its
    values, rows, columns, rows and columns of its first block before it; address of its elements; address and pitch of
    its scales). Aligned boxes have rows that start at multiples of 16 elements.
    """
    words = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
    if programs := len(owners) - (whole if divides else 0):
        with torch.cuda.device_of(table):
            _quantise_blocks[(programs,)](table, owners, whole, words, block, aligned, divides, num_warps=QUANT_WARPS)
