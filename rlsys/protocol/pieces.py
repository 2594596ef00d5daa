"""Large buffers in pieces: how raw memory crosses Ray's serializer fastest on a small machine.

Ray copies every out-of-band buffer of a mebibyte or more with six threads that it starts each time, which on a few
cores costs more than the copy. Smaller buffers are copied by one thread, one after the other, so pieces whose length is
a multiple of Ray's alignment are contiguous in the object and are joined on arrival without a copy.
"""

import ctypes
import os
from collections.abc import Sequence

import numpy as np

from rlsys.ipc.framing import Buffer

FEW_CORES = 8
PIECE_BYTES = (1 << 20) - 64


def split_buffers(buffers: Sequence[memoryview]) -> tuple[list[int], list[memoryview]]:
    """(pieces of each buffer, all pieces in order)."""
    step = PIECE_BYTES if (os.cpu_count() or 1) <= FEW_CORES else max((b.nbytes for b in buffers), default=0) or 1
    pieces = [[buffer[at : at + step] for at in range(0, max(buffer.nbytes, 1), step)] for buffer in buffers]
    return [len(part) for part in pieces], [piece for part in pieces for piece in part]


def join_buffers(counts: Sequence[int], pieces: Sequence[Buffer]) -> list[Buffer]:
    """The buffers: over the same memory where their pieces are contiguous, else copied."""
    taken = iter(pieces)
    return [_join([next(taken) for _ in range(count)]) for count in counts]


def _join(pieces: list[Buffer]) -> Buffer:
    if len(pieces) == 1:
        return pieces[0]
    views = [np.frombuffer(piece, np.uint8) for piece in pieces]
    starts = [view.ctypes.data for view in views]
    if any(start + view.nbytes != after for start, view, after in zip(starts, views, starts[1:], strict=False)):
        return np.concatenate(views).data
    whole = (ctypes.c_ubyte * sum(view.nbytes for view in views)).from_address(starts[0])
    whole.pieces = views  # pyrefly: ignore
    return memoryview(whole).cast("B").toreadonly()
