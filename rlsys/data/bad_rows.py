"""Parsing rows, with bad rows either refused at once or skipped and counted (data.bad_rows)."""

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rlsys.config.schema.data import BadRows
from rlsys.data.files import BadRow, Row
from rlsys.data.rows import MissingColumns
from rlsys.utils.errors import DataError

NUM_SHOWN = 5
T = TypeVar("T")

log = logging.getLogger(__name__)


def parse_rows(
    rows: Iterable[Row | BadRow], parse: Callable[[Row], T], *, bad_rows: BadRows, num_threads: int = 1
) -> tuple[list[T], list[BadRow]]:
    """`parse` of every row, in order, and the rows for which it raised ValueError.

    With "refuse" the first bad row raises DataError; with "skip" only a source without any good row does.
    """
    good: list[T] = []
    bad: list[BadRow] = []
    for result in _results(rows, parse, num_threads):
        if not isinstance(result, BadRow):
            good.append(result)
            continue
        if bad_rows == "refuse":
            raise DataError(f"{result}{result.fix}")
        bad.append(result)
    if bad:
        shown = "\n  ".join(map(str, bad[:NUM_SHOWN]))
        more = f"\n  and {len(bad) - NUM_SHOWN} more" if len(bad) > NUM_SHOWN else ""
        log.warning("skipped %d bad rows, kept %d:\n  %s%s", len(bad), len(good), shown, more)
        if not good:
            raise DataError(f"no row can be used; the first bad row: {bad[0]}")
    return good, bad


def _results(rows: Iterable[Row | BadRow], parse: Callable[[Row], T], num_threads: int) -> Iterator[T | BadRow]:
    def result(row: Row | BadRow) -> T | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return parse(row)
        except MissingColumns as error:
            return BadRow(row.file, row.place, str(error), fix="")
        except ValueError as error:
            return BadRow(row.file, row.place, str(error))

    if num_threads <= 1:
        yield from map(result, rows)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(result, rows)
