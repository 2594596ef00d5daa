"""Splitting one rank's rows into micro-batches, as many on every rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlsys.batching import TOO_LONG, micro_batches
from rlsys.models.packing import TokenRows


@dataclass(frozen=True)
class MicroBatches:
    """A fixed number of `rows` each, or as many rows as fit `max_tokens` real tokens a rank; exactly one of the two.

    Consecutive `rows_together` rows (the two answers of a preference pair) stay in one micro-batch.
    """

    rows: int | None = None
    max_tokens: int | None = None
    rows_together: int = 1

    def __post_init__(self) -> None:
        size = self.rows if self.max_tokens is None else self.max_tokens
        if (self.rows is None) == (self.max_tokens is None) or size is None or size < 1:
            raise ValueError(f"a micro-batch needs either rows or max_tokens, at least 1; got {self}")


@dataclass(frozen=True)
class Pack:
    """One micro-batch: its row numbers (None where only other ranks have rows left) and its packed tokens."""

    index: Tensor | None
    tokens: TokenRows


def split_rows(
    lengths: Sequence[int], size: MicroBatches, *, agree: Callable[[int], int], num_sharing: int = 1
) -> list[list[int]]:
    """Row numbers of each micro-batch, as many as `agree` makes of it (the maximum over ranks), the last ones empty.

    `num_sharing` ranks compute each row together, so a token budget counts for each. ValueError on all ranks if a row
    alone is over the budget.
    """
    if len(lengths) % size.rows_together:
        raise ValueError(f"{len(lengths)} rows do not come in groups of {size.rows_together}")
    if size.rows is None and lengths:
        assert size.max_tokens is not None
        budget = size.max_tokens * num_sharing
        parts = micro_batches(lengths, budget, rows_together=size.rows_together, agree=agree)
        return [part.tolist() for part in parts]
    step = -(-(size.rows or 1) // size.rows_together) * size.rows_together
    fixed = [list(range(at, min(at + step, len(lengths)))) for at in range(0, len(lengths), step)]
    agreed = agree(len(fixed))
    if agreed >= TOO_LONG:
        raise ValueError(f"a row on another rank exceeds the budget of {size.max_tokens} tokens a micro-batch")
    return fixed + [[]] * (agreed - len(fixed))
