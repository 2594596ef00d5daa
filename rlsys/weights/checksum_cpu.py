"""The checksum of a box of a tensor, by NumPy.

The bytes of each row (the last dimension) are read as 64-bit words; the checksum is the sum over rows r and words q of
word * word_weight(q) * row_weight(r), modulo 2**64, with odd pseudo-random weights. A sum over parts is the sum of the
parts, so boxes of one tensor can be summed on different ranks. One pass over the memory; not cryptographic.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlsys.weights.layout import BITS

MODULUS = 1 << 64
WORD_BYTES = 8
ROW_STREAM, WORD_STREAM = 0x243F6A8885A308D3, 0x13198A2E03707344
BoxValues = tuple[Tensor, Sequence[int], Sequence[int]]
"""A box of a tensor: its values, its start, and the shape of the whole tensor."""


def cpu_checksum(values: Tensor, start: Sequence[int], full_shape: Sequence[int]) -> int:
    """The part of the checksum of a tensor of `full_shape` that its box `values` at `start` contributes."""
    if values.numel() == 0:
        return 0
    shape, full, begin = tuple(values.shape) or (1,), tuple(full_shape) or (1,), tuple(start) or (0,)
    words, first_word = _words(values.detach().reshape(-1, shape[-1]), begin[-1])
    by_row = np.einsum("rw,w->r", words.numpy(), _word_weights(first_word, first_word + words.shape[1]))
    return int(np.einsum("r,r->", by_row, _row_weights(begin[:-1], shape[:-1], full[:-1]))) % MODULUS


def _words(rows: Tensor, start: int) -> tuple[Tensor, int]:
    """Rows (R, n) of elements from element `start` of their row as int64 words (R, W), and the number of the first."""
    per_word = WORD_BYTES // rows.element_size()
    before = start % per_word
    after = -(before + rows.shape[1]) % per_word
    rows = rows.contiguous()
    if before or after:
        rows = pad(rows.view(BITS[rows.element_size()]), (before, after))
    elif rows.storage_offset() % per_word:
        rows = rows.clone()
    return rows.view(torch.int64), start // per_word


@lru_cache(maxsize=64)
def _row_weights(start: tuple[int, ...], shape: tuple[int, ...], full: tuple[int, ...]) -> np.ndarray:
    """Weights of the rows of a box, by the rows' numbers in the whole tensor."""
    numbers = np.zeros(shape, dtype=np.int64)
    for at, n, size, axis in zip(start, shape, full, range(len(shape)), strict=True):
        axes = [1] * len(shape)
        axes[axis] = n
        numbers = numbers * size + np.arange(at, at + n).reshape(axes)
    return _odd_hash(ROW_STREAM, numbers.reshape(-1))


@lru_cache(maxsize=64)
def _word_weights(first: int, stop: int) -> np.ndarray:
    return _odd_hash(WORD_STREAM, np.arange(first, stop))


def _odd_hash(stream: int, numbers: np.ndarray) -> np.ndarray:
    """Odd int64 weights: the finaliser of SplitMix64 over a stream and a number."""
    x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)
