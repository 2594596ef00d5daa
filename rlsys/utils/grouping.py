"""Grouping by a key or by size."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


def group_by(values: Iterable[ValueT], key: Callable[[ValueT], KeyT]) -> dict[KeyT, list[ValueT]]:
    """The values of each key; keys and values are in the order in which they come."""
    groups: dict[KeyT, list[ValueT]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def buckets(num_bytes: Mapping[KeyT, int], limit: int) -> Iterator[list[KeyT]]:
    """Keys in their order, in groups of at most `limit` bytes; a larger one is a group of its own."""
    bucket, size = list[KeyT](), 0
    for name, own in num_bytes.items():
        if bucket and size + own > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += own
    if bucket:
        yield bucket
