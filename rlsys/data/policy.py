"""What becomes of rows that cannot be used: refused at once, or skipped and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from rlsys.data.files import BadRow, Row
from rlsys.utils.errors import ConfigError, DataError

BadRowPolicy = Literal["refuse", "skip"]
NUM_SHOWN = 5
T = TypeVar("T")

log = logging.getLogger(__name__)


def read_all(
    rows: Iterable[Row | BadRow], read: Callable[[Row], T], *, bad_rows: BadRowPolicy, num_threads: int = 1
) -> tuple[list[T], list[BadRow]]:
    """What `read` makes of every row, in order, and the rows for which it raised ValueError.

    With "refuse" the first bad row raises DataError; with "skip" only having no good row at all does.
    """
    if bad_rows not in ("refuse", "skip"):
        raise ConfigError(f"data.bad_rows={bad_rows}: must be refuse or skip")
    good: list[T] = []
    bad: list[BadRow] = []
    for outcome in _outcomes(rows, read, num_threads):
        if not isinstance(outcome, BadRow):
            good.append(outcome)
            continue
        if bad_rows == "refuse":
            raise DataError(f"{outcome}; correct it, or skip such rows by data.bad_rows=skip")
        bad.append(outcome)
    if bad:
        shown = "\n  ".join(map(str, bad[:NUM_SHOWN]))
        more = f"\n  and {len(bad) - NUM_SHOWN} more" if len(bad) > NUM_SHOWN else ""
        log.warning("%d bad rows are skipped, %d are good:\n  %s%s", len(bad), len(good), shown, more)
        if not good:
            raise DataError(f"no row can be used; the first: {bad[0]}")
    return good, bad


def _outcomes(rows: Iterable[Row | BadRow], read: Callable[[Row], T], num_threads: int) -> Iterator[T | BadRow]:
    def outcome(row: Row | BadRow) -> T | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return read(row)
        except ValueError as error:
            return BadRow(row.file, row.place, str(error))

    if num_threads <= 1:
        yield from map(outcome, rows)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(outcome, rows)
