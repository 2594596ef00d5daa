"""The ledger of a fleet: each issued row is pending until it is answered or dropped, once."""


class Ledger:
    """Counts of rows since the start; only the numbers of the pending ones are kept."""

    def __init__(self) -> None:
        self.issued = self.answered = 0
        self.pending: set[int] = set()

    def issue(self, num_rows: int) -> range:
        """Numbers of new rows, which are now pending."""
        rows = range(self.issued, self.issued + num_rows)
        self.issued += num_rows
        self.pending.update(rows)
        return rows

    def settle(self, row: int, *, answered: bool) -> None:
        """Answer a pending row, or drop it."""
        assert row in self.pending, f"row {row} is not pending: it was settled before, or never issued"
        self.pending.remove(row)
        self.answered += answered

    def counts(self) -> dict[str, int]:
        dropped = self.issued - self.answered - len(self.pending)
        return {"issued": self.issued, "answered": self.answered, "dropped": dropped, "pending": len(self.pending)}
