"""Futures of DataProto: rows that stay in the workers that made them until another worker needs them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.protocol.columns import concat_meta
from rlsys.protocol.data import DataProto, chunk_bounds


@dataclass
class DataProtoFuture:
    """Rows that workers hold: passed from group to group, fetched only where they are used.

    `futures` each have `.get(deadline_s)` that gives a DataProto (or are one); `collect_fn` joins what they give and
    `dispatch_fn` takes this receiver's part of it. Both are sent to the receiver: they must be module-level functions.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """The rows of all futures, in their order."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """One future for each of `chunks` contiguous parts; nothing is fetched."""
        return [
            DataProtoFuture(self.collect_fn, self.futures, _ChunkOf(index, chunks, self.dispatch_fn))
            for index in range(chunks)
        ]

    def get(self, deadline_s: float | None = None) -> DataProto:
        """Wait for all futures, at most `deadline_s` together, collect and dispatch; TypeError for foreign results."""
        end_s = None if deadline_s is None else time.monotonic() + deadline_s
        parts = [_resolve(future, end_s) for future in self.futures]
        if self.collect_fn is DataProto.concat and isinstance(self.dispatch_fn, _ChunkOf) and not self.dispatch_fn.of:
            return self.dispatch_fn.take(parts)
        rows = self.collect_fn(parts)
        return rows if self.dispatch_fn is None else self.dispatch_fn(rows)


@dataclass(frozen=True)
class _ChunkOf:
    """Chunk `index` of `chunks` of what `of` makes of the collected rows."""

    index: int
    chunks: int
    of: Callable[[DataProto], DataProto] | None

    def __call__(self, rows: DataProto) -> DataProto:
        return (self.of(rows) if self.of else rows).chunk(self.chunks)[self.index]

    def take(self, parts: Sequence[DataProto]) -> DataProto:
        """The same as chunking the concatenated parts, without joining the rows of other chunks."""
        ends = list(itertools.accumulate(len(part) for part in parts))
        meta_info = concat_meta([part.meta_info for part in parts])
        whole = DataProto(meta_info=meta_info)
        assert whole.is_padding_enabled() or ends[-1] % self.chunks == 0, (
            f"only support equal chunk. Got size of DataProto {ends[-1]} and chunk {self.chunks}."
        )
        start, end = chunk_bounds(ends[-1], self.chunks, even=parts[0].batch is None)[self.index]
        cuts = [(max(start - e + len(p), 0), min(end - e + len(p), len(p))) for p, e in zip(parts, ends, strict=True)]
        slices = [part[first:last] for part, (first, last) in zip(parts, cuts, strict=True) if first < last]
        rows = slices[0] if len(slices) == 1 else DataProto.concat(slices or [parts[0][:0]])
        return DataProto(rows.batch, rows.non_tensor_batch, meta_info)


def _resolve(future: Any, end_s: float | None) -> DataProto:
    remaining_s = None if end_s is None else max(0.0, end_s - time.monotonic())
    rows = future if isinstance(future, DataProto) else future.get(remaining_s)
    if not isinstance(rows, DataProto):
        raise TypeError(f"a DataProtoFuture got a {type(rows)} instead of a DataProto")
    return rows
