"""The ledger of a fleet: each issued row is pending until it is answered or dropped for a reason, once."""

from collections import Counter


class LedgerError(AssertionError):
    """A row was settled twice: always a bug in this package."""


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

    def settle(self, row: int, reason: str = "") -> None:
        """Answer a pending row, or give it up for a reason, which is counted."""
        if row not in self.pending:
            raise LedgerError(f"row {row} is not pending: it was settled before, or never issued")
        self.pending.remove(row)
        if reason:
            self.dropped[reason] += 1
        else:
            self.answered += 1

    def counts(self) -> dict[str, int]:
        return {
            "issued": self.issued,
            "answered": self.answered,
            "dropped": self.dropped.total(),
            "pending": len(self.pending),
        }
