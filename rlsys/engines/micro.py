"""Splitting one rank's rows into micro-batches, as many on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatches:
    """A fixed number of `rows` each, or as many rows as fit `max_tokens` real tokens; exactly one of the two."""

    rows: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        size = self.rows if self.max_tokens is None else self.max_tokens
        if (self.rows is None) == (self.max_tokens is None) or size is None or size < 1:
            raise ValueError(f"a micro-batch is so many rows or so many tokens, got {self}")


def split_rows(lengths: Sequence[int], size: MicroBatches) -> list[list[int]]:
    """Row numbers of each micro-batch; a row longer than `max_tokens` gets one of its own."""
    if size.rows is not None:
        return [list(range(i, min(i + size.rows, len(lengths)))) for i in range(0, len(lengths), size.rows)]
    assert size.max_tokens is not None
    parts: list[list[int]] = []
    filled: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = next((i for i, n in enumerate(filled) if n + lengths[row] <= size.max_tokens), None)
        if at is None:
            parts.append([row])
            filled.append(lengths[row])
        else:
            parts[at].append(row)
            filled[at] += lengths[row]
    return [sorted(part) for part in parts]
