"""Large buffers in pieces: how raw memory crosses Ray's serializer fastest on a small machine.

Ray copies every out-of-band buffer of a mebibyte or more with six threads that it starts each time, which on a few
cores costs more than the copy. Smaller buffers are copied by one thread, one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from rlsys.ipc.framing import Buffer

FEW_CORES = 8
PIECE_BYTES = (1 << 20) - 1


def split_buffers(buffers: Sequence[memoryview]) -> tuple[list[int], list[memoryview]]:
    """(pieces of each buffer, all pieces in order)."""
    step = PIECE_BYTES if (os.cpu_count() or 1) <= FEW_CORES else max((b.nbytes for b in buffers), default=0) or 1
    pieces = [[buffer[at : at + step] for at in range(0, max(buffer.nbytes, 1), step)] for buffer in buffers]
    return [len(part) for part in pieces], [piece for part in pieces for piece in part]


def join_buffers(counts: Sequence[int], pieces: Sequence[Buffer]) -> list[Buffer]:
    """The buffers, those of several pieces in new memory."""
    taken = iter(pieces)
    return [_join([next(taken) for _ in range(count)]) for count in counts]


def _join(pieces: list[Buffer]) -> Buffer:
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces]).data
