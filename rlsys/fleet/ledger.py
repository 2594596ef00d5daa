"""Proof that no prompt is lost or duplicated: each issued row is answered once, dropped for a reason, or pending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class LedgerError(AssertionError):
    """A row was answered twice or is missing: always a bug in this package."""


class Ledger:
    """Counts of rows since the start; only the numbers of the pending ones are kept."""

    def __init__(self) -> None:
        self.issued = self.answered = 0
        self.dropped: Counter[str] = Counter()
        self.pending: set[int] = set()

    def issue(self, num_rows: int) -> range:
        """Numbers of new rows, which are now pending."""
        rows = range(self.issued, self.issued + num_rows)
        self.issued += num_rows
        self.pending.update(rows)
        return rows

    def answer(self, rows: Iterable[int]) -> None:
        self.answered += self._settle(rows, "answered")

    def drop(self, rows: Iterable[int], reason: str) -> None:
        """Give up on rows; `reason` is counted."""
        self.dropped[reason] += self._settle(rows, f"dropped ({reason})")

    def _settle(self, rows: Iterable[int], what: str) -> int:
        numbers = list(rows)
        if len(set(numbers)) != len(numbers) or not self.pending.issuperset(numbers):
            bad = sorted(set(numbers) - self.pending)[:5]
            raise LedgerError(f"rows {bad} are {what} though they are not pending: settled twice or never issued")
        self.pending.difference_update(numbers)
        return len(numbers)

    @property
    def lost(self) -> int:
        return self.issued - self.answered - self.dropped.total() - len(self.pending)

    def check(self) -> None:
        """LedgerError unless issued = answered + dropped + pending."""
        if self.lost:
            raise LedgerError(f"{self.lost} rows are lost: {self.counts()}")

    def counts(self) -> dict[str, int]:
        return {
            "issued": self.issued,
            "answered": self.answered,
            "dropped": self.dropped.total(),
            "pending": len(self.pending),
            "lost": self.lost,
        }
