"""Batches as the controller sees them: something with rows that can be sliced and concatenated.

It works on any type with `len`, slices, `chunk` and `concat`, so that a worker without DataProto does not import torch.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard


def is_rows(value: object) -> TypeGuard[Any]:
    """Whether a value is a batch: it has a length, slices, `chunk` and `concat`."""
    return all(hasattr(type(value), name) for name in ("__len__", "__getitem__", "chunk", "concat"))


def is_future(value: object) -> TypeGuard[Any]:
    """Whether a value is a `DataProtoFuture`: it has `futures`, `collect_fn`, `get` and `chunk`."""
    return all(hasattr(value, name) for name in ("futures", "collect_fn", "get", "chunk"))


def split_rows(rows: Any, chunks: int, *, pads: bool) -> tuple[list[object], list[int]]:
    """Equal shares of a batch and the number of repeated rows at the end of each.

    When the rows do not divide, the first ones are repeated after the last (`pads`) or a ValueError is raised.
    """
    total = len(rows)
    if total % chunks and not pads:
        raise ValueError(f"{total} rows cannot be split evenly over {chunks} data-parallel ranks")
    size = -(-total // chunks)
    if missing := size * chunks - total:
        rows = rows.concat([rows] * (1 + -(-missing // total)))
    ends = [(index + 1) * size for index in range(chunks)]
    return [rows[end - size : end] for end in ends], [max(0, min(size, end - total)) for end in ends]


def join_rows(parts: Sequence[Any]) -> object:
    """One batch of the rows of several; empty parts are left out, and the only other one is not copied."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    return filled[0] if len(filled) == 1 else filled[0].concat(filled)
