"""Where the training stands in its data: (seed, epoch, position), exact to the row and resumable.

Every epoch is a permutation of the rows that depends on seed and epoch alone. As with verl's data loader, an epoch ends
when it has no full batch left; the rows left over come again, mixed anew, in the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlsys.utils.errors import CheckpointError, ConfigError


def permutation(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation (num_rows,) int64; rests only on PCG64's raw stream, which numpy keeps the same for ever."""
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class Step:
    """One batch: the epoch it belongs to and the rows it takes."""

    epoch: int
    rows: tuple[int, ...]


class Cursor:
    """Hands out batches for ever. `dataset` identifies the rows, so that a resume with other rows is refused.

    Raises ConfigError when the dataset is smaller than a batch.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        batch_size: int,
        seed: int = 1,
        shuffle: bool = True,
        dataset: str = "",
        batch_size_key: str = "data.train_batch_size",
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"{batch_size_key}={batch_size}: must be at least 1")
        if num_rows < batch_size:
            raise ConfigError(f"data.train_files hold {num_rows} usable rows, {batch_size_key}={batch_size} needs more")
        self._num_rows, self._batch_size, self._shuffle, self._dataset = num_rows, batch_size, shuffle, dataset
        self._seed, self._epoch, self._position = seed, 0, 0
        self._order_of_epoch: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch + (self._position + self._batch_size > self._num_rows)

    def next(self) -> Step:
        """The next batch."""
        if self._position + self._batch_size > self._num_rows:
            self._epoch, self._position = self._epoch + 1, 0
        order = self._order()
        rows = order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return Step(self._epoch, tuple(rows.tolist()))

    def _order(self) -> np.ndarray:
        if self._order_of_epoch is None or self._order_of_epoch[0] != self._epoch:
            order = np.arange(self._num_rows)
            if self._shuffle:
                order = permutation(self._num_rows, seed=self._seed, epoch=self._epoch)
            self._order_of_epoch = self._epoch, order
        return self._order_of_epoch[1]

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the position counts rows, so another batch size may go on from it."""
        return asdict(
            CursorState(self._seed, self._epoch, self._position, self._num_rows, self._shuffle, self._dataset)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a cursor over the same rows stood. Raises CheckpointError for another dataset, seed or order."""
        try:
            found = CursorState(**state)
        except TypeError as error:
            raise CheckpointError(f"the checkpoint holds no data position: {error}") from error
        own = CursorState(self._seed, found.epoch, found.position, self._num_rows, self._shuffle, self._dataset)
        for name, saved, now in zip(asdict(found), asdict(found).values(), asdict(own).values()):
            if saved != now:
                raise CheckpointError(f"the data has changed since the checkpoint: {name} was {saved}, is {now}")
        if not (0 <= found.position <= self._num_rows and found.epoch >= 0):
            raise CheckpointError(f"the checkpoint's data position is impossible: {found}")
        self._epoch, self._position = found.epoch, found.position


@dataclass(frozen=True)
class CursorState:
    """What `Cursor.state_dict` holds."""

    seed: int
    epoch: int
    position: int
    num_rows: int
    shuffle: bool
    dataset: str
