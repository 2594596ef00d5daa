"""Rows of datasets that are read during training: splits of the hub, files here or at addresses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rlsys.config.schema.data import TrainingRowsConfig
from rlsys.data.cursor import BatchRows, permutation
from rlsys.data.dataset import PromptDataset, parse_rows
from rlsys.data.files import Row
from rlsys.data.rows import PromptRow
from rlsys.interfaces import State
from rlsys.utils.errors import CheckpointError, DataError
from rlsys.utils.hub import open_rows


class RowStream(PromptDataset):
    """Endless rows in the order of their sources, and the cursor over them; as a dataset, the rows now in memory.

    `parse` makes a prompt or the texts of a row, or None to leave it out; batches have `batch_size` rows.
    Blocks of `shuffle_buffer_size` rows are read at a time, with `shuffle` each permuted by the seed and its number. A
    state holds where the block began in the sources and how much of it was used, so a resume is exact.
    """

    def __init__(self, names: Sequence[str], data: TrainingRowsConfig, parse: Callable[[Row], Any], batch_size: int):
        self._names, self._data, self._parse, self._batch_size = list(names), data, parse, batch_size
        self._epoch, self._block, self._position = 0, -1, 0
        self._picked: dict[int, object] = {}
        super().__init__([])
        self._open(None)
        self._read()

    def next(self) -> BatchRows:
        """The numbers of the next batch's rows, which `self[number]` gives until the next batch."""
        picked: dict[int, Any] = {}
        while len(picked) < self._batch_size:
            if self._position == len(self._rows):
                self._read()
            end = self._position + self._batch_size - len(picked)
            picked |= zip(self._numbers[self._position : end], self._rows[self._position : end], strict=True)
            self._position = min(end, len(self._rows))
        self._picked = picked
        return BatchRows(self._epoch, tuple(picked))

    def __getitem__(self, index: int) -> Any:
        return self._picked[index] if index in self._picked else self._rows[index]

    def _open(self, state: State | None) -> None:
        self._source = open_rows(self._names)
        if state is not None:
            self._source.load_state_dict(dict(state))
        self._iterator = iter(self._source)

    def _read(self) -> None:
        """Read the next block, from the start of the sources again at their end."""
        self._block, self._position = self._block + 1, 0
        values = self._next_rows()
        if not values:
            self._open(None)
            self._epoch += 1
            values = self._next_rows()
        if not values:
            raise DataError(f"{', '.join(self._names)} have no rows")
        if self._data.shuffle:
            order = permutation(len(values), seed=self._data.seed, epoch=self._block)
            values = [values[number] for number in order]
        first = self._block * self._data.shuffle_buffer_size
        rows = (Row(",".join(self._names), f"row {first + at}", row) for at, row in enumerate(values))
        parsed, bad = parse_rows(rows, self._parse, bad_rows=self._data.bad_rows)
        kept = {first + at: row for at, row in enumerate(parsed) if row is not None}
        self._numbers = list(kept)
        self._rows = [replace(row, index=at) if isinstance(row, PromptRow) else row for at, row in kept.items()]
        self.bad_rows += tuple(bad)
        self.num_overlong += len(parsed) - len(self._rows)

    def _next_rows(self) -> list[Any]:
        """The next rows of the sources, a block at most, noting where they begin."""
        self._start = self._source.state_dict()
        return list(islice(self._iterator, self._data.shuffle_buffer_size))

    def state_dict(self) -> dict[str, object]:
        """Plain values, with what the order depends on."""
        place = {"source": self._start, "block": self._block, "position": self._position, "epoch": self._epoch}
        return {**place, **self._order()}

    def _order(self) -> dict[str, object]:
        given = self._data.model_dump(include={"seed", "shuffle", "shuffle_buffer_size"})
        return {**given, "train_files": self._names}

    def load_state_dict(self, state: State) -> None:
        """Continue where a stream of the same sources was. CheckpointError for others, or another order."""
        for name, value in self._order().items():
            if state.get(name) != value:
                back = f"set data.{name}={state.get(name)}, or start over with trainer.resume_mode=disable"
                raise CheckpointError(f"data.{name} is {value}, but the checkpoint's differs: {back}")
        self._open(state["source"])
        self._block, self._epoch = state["block"] - 1, state["epoch"]
        self._read()
        self._position = state["position"]
