"""Copies of rows into new memory. On the CPU large ones go to huge pages (numpy asks for them, torch does not)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HUGE_BYTES = 1 << 22


def take_rows(tensor: Tensor | np.ndarray, rows: Tensor) -> Tensor | np.ndarray:
    """Copies of the rows at integer indices, negative ones counted from the end; IndexError outside."""
    if isinstance(tensor, np.ndarray):
        return tensor[rows.cpu().numpy()]
    rows = rows.to(tensor.device, torch.int64)
    rows = torch.where(rows < 0, rows + len(tensor), rows)
    return torch.index_select(tensor, 0, rows, out=_memory(len(rows), [tensor]))


def copy_rows(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return join_rows([tensor])


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts one after the other."""
    return torch.cat(list(parts), out=_memory(sum(map(len, parts)), parts))


def _memory(num_rows: int, parts: Sequence[Tensor]) -> Tensor | None:
    """Memory for so many rows; None where torch makes it: for small rows, parts that differ, and what is not plain."""
    shape, dtype = (num_rows, *parts[0].shape[1:]), parts[0].dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    plain = all(part.device.type == "cpu" and not part.requires_grad for part in parts)
    if num_bytes < HUGE_BYTES or not plain or any((p.dtype, p.shape[1:]) != (dtype, shape[1:]) for p in parts):
        return None
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
