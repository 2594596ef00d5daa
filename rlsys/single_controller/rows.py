"""Batches as the controller sees them: something with rows that can be sliced and concatenated.

Which rank gets which rows. It works on any type with `len`, slices, `chunk` and `concat`, so that a worker process
without DataProto does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlsys.single_controller.calls import Future

RowSpan = tuple[int, int, int]
"""(part, start, stop): the rows start..stop of a part."""


@dataclass(frozen=True)
class FutureRows:
    """Share `index` of `chunks` equal ones of the rows that running `calls` will return, in the order of the calls.

    A call is a Future on the controller; on its way to a worker it is the (header, value) references of the Future.
    """

    calls: tuple[Any, ...]
    index: int = 0
    chunks: int = 1
    pads: bool = False

    def get(self) -> Any:
        """The share, fetched to the controller."""
        whole = [call.get() for call in self.calls]
        spans, _ = row_spans([len(rows) for rows in whole], self.index, self.chunks, pads=self.pads)
        return take_spans(whole, spans)

    def to_references(self) -> FutureRows:
        """The same share for a worker, which fetches only the rows that it needs."""
        return replace(self, calls=tuple(call.pending.references for call in self.calls))


def future_rows(value: Any) -> FutureRows | None:
    """A `DataProtoFuture` that only concatenates running calls as FutureRows; None for anything else."""
    if isinstance(value, FutureRows) or not is_future(value):
        return value if isinstance(value, FutureRows) else None
    only_joins = value.dispatch_fn is None and getattr(value.collect_fn, "__name__", "") == "concat"
    if only_joins and value.futures and all(isinstance(call, Future) for call in value.futures):
        return FutureRows(tuple(value.futures))
    return None


def is_rows(value: Any) -> bool:
    """Whether a value is a batch: it has a length, slices, `chunk` and `concat`."""
    kind = type(value)
    return all(hasattr(kind, name) for name in ("__len__", "__getitem__", "chunk", "concat"))


def is_future(value: Any) -> bool:
    """Whether a value is a `DataProtoFuture`: it has `futures`, `collect_fn`, `get` and `chunk`."""
    return all(hasattr(value, name) for name in ("futures", "collect_fn", "get", "chunk"))


def row_spans(counts: Sequence[int], index: int, chunks: int, *, pads: bool) -> tuple[list[RowSpan], int]:
    """The rows of share `index` of `chunks` over parts with `counts` rows, and how many of them are repeated ones.

    When the total does not divide, the first rows are repeated behind the last (`pads`) or a ValueError is raised.
    """
    total = sum(counts)
    if total % chunks and not pads:
        raise ValueError(f"{total} rows cannot be split evenly over {chunks} data-parallel ranks")
    if total == 0:
        return [], 0
    size = -(-total // chunks)
    starts = [sum(counts[:part]) for part in range(len(counts))]
    spans: list[RowSpan] = []
    position, end = index * size, (index + 1) * size
    num_padding = min(size, max(0, end - total))
    while position < end:
        row = position % total
        part = max(p for p, start in enumerate(starts) if start <= row and counts[p])
        taken = min(end - position, starts[part] + counts[part] - row)
        spans.append((part, row - starts[part], row - starts[part] + taken))
        position += taken
    return spans, num_padding


def take_spans(parts: Sequence[Any], spans: Sequence[RowSpan]) -> Any:
    """The rows named by spans as one batch; a part that is taken whole is not copied."""
    taken = [
        parts[part] if (start, stop) == (0, len(parts[part])) else parts[part][start:stop]
        for part, start, stop in spans
        if stop > start
    ]
    if not taken:
        return parts[0][0:0]
    return taken[0] if len(taken) == 1 else type(taken[0]).concat(taken)


def split_rows(rows: Any, chunks: int, *, pads: bool) -> tuple[list[Any], list[int]]:
    """Equal shares of a batch and the number of repeated rows at the end of each."""
    shares = [row_spans([len(rows)], index, chunks, pads=pads) for index in range(chunks)]
    return [take_spans([rows], spans) for spans, _ in shares], [num_padding for _, num_padding in shares]
