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
    num_rows = len(tensor)
    rows = rows.to(tensor.device, torch.int64)
    rows = torch.where(rows < 0, rows + num_rows, rows)
    shape = (len(rows), *tensor.shape[1:])
    if _is_small(shape, tensor):
        return tensor.index_select(0, rows)
    return torch.index_select(tensor, 0, rows, out=_new(shape, tensor.dtype))


def copy_rows(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.clone() if _is_small(tensor.shape, tensor) else _new(tensor.shape, tensor.dtype).copy_(tensor)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts one after the other."""
    first = parts[0]
    alike = all(part.dtype == first.dtype and part.shape[1:] == first.shape[1:] for part in parts)
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    if not alike or any(_is_small(shape, part) for part in parts):
        return torch.cat(list(parts))
    return torch.cat(list(parts), out=_new(shape, first.dtype))


def _is_small(shape: Sequence[int], source: Tensor) -> bool:
    small = math.prod(shape) * source.element_size() < HUGE_BYTES
    return small or source.device.type != "cpu" or source.requires_grad


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    memory = torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return memory.view(dtype).view(shape)
