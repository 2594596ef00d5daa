"""Futures of DataProto: rows that stay in the workers that made them until another worker needs them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlsys.protocol.data import DataProto, concat_chunk

TakeFn = Callable[[DataProto], DataProto]


@dataclass
class DataProtoFuture:
    """Rows that workers hold: passed from group to group, fetched only where they are used.

    `futures` each have `.get(deadline_s)` that gives a DataProto (or are one); `collect_fn` joins what they give and
    `dispatch_fn` takes this receiver's part of it. Both are sent to the receiver: they must be module-level functions.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Any]
    dispatch_fn: TakeFn | None = None

    @staticmethod
    def concat(data: list[object]) -> "DataProtoFuture":
        """The rows of all futures, in their order."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=list(data))

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """One future for each of `chunks` contiguous parts; nothing is fetched."""
        if self.collect_fn is DataProto.concat and self.dispatch_fn is None:
            return [DataProtoFuture(partial(concat_chunk, chunks, index), self.futures) for index in range(chunks)]
        return [
            DataProtoFuture(self.collect_fn, self.futures, partial(_chunk_of, self.dispatch_fn, chunks, index))
            for index in range(chunks)
        ]

    def get(self, deadline_s: float | None = None) -> DataProto:
        """Wait for all futures, at most `deadline_s` together, collect and dispatch; TypeError for foreign results."""
        end_s = None if deadline_s is None else time.monotonic() + deadline_s
        rows = self.collect_fn([_resolve(future, end_s) for future in self.futures])
        return rows if self.dispatch_fn is None else self.dispatch_fn(rows)


def _chunk_of(dispatch_fn: TakeFn | None, chunks: int, index: int, rows: DataProto) -> DataProto:
    return (rows if dispatch_fn is None else dispatch_fn(rows)).chunk(chunks)[index]


def _resolve(future: Any, end_s: float | None) -> DataProto:
    remaining_s = None if end_s is None else max(0.0, end_s - time.monotonic())
    rows = future if isinstance(future, DataProto) else future.get(remaining_s)
    if not isinstance(rows, DataProto):
        raise TypeError(f"a DataProtoFuture got a {type(rows)} instead of a DataProto")
    return rows
