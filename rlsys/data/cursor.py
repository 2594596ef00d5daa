"""The position of training in its data: (seed, epoch, position), exact to the row and resumable.

Every epoch is a permutation of the rows that depends only on seed and epoch. As with verl's data loader, an epoch ends
when it has no full batch left; the remaining rows are shuffled into the next one.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rlsys.config.plan import check_enough_rows
from rlsys.interfaces import State
from rlsys.utils.errors import CheckpointError, ConfigError


@lru_cache(maxsize=1)
def permutation(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation (num_rows,) int64; uses only PCG64's raw stream, which numpy guarantees not to change."""
    return np.argsort(np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows), kind="stable")


@dataclass(frozen=True)
class BatchRows:
    """The rows of one batch, and the epoch they belong to."""

    epoch: int
    rows: tuple[int, ...]


class Cursor:
    """An endless iterator over batches. `dataset` identifies the rows: a resume with other rows is refused, or with
    `restarts` begins a new epoch of them.

    Raises ConfigError if the dataset is smaller than a batch.
    """

    def __init__(
        self, num_rows: int, *, batch_size: int, seed: int = 1, shuffle: bool, dataset: str = "", restarts: bool = False
    ) -> None:
        check_enough_rows(num_rows, batch_size)
        self._num_rows, self._batch_size, self._shuffle, self._dataset = num_rows, batch_size, shuffle, dataset
        self._seed, self._restarts, self._epoch, self._position = seed, restarts, 0, 0

    def next(self) -> BatchRows:
        """The next batch."""
        if self._position + self._batch_size > self._num_rows:
            self._epoch, self._position = self._epoch + 1, 0
        order = np.arange(self._num_rows)
        if self._shuffle:
            order = permutation(self._num_rows, seed=self._seed, epoch=self._epoch)
        rows = order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return BatchRows(self._epoch, tuple(rows.tolist()))

    def state_dict(self) -> dict[str, object]:
        """Plain values; the position counts rows, so a run with another batch size can continue from it."""
        return {**self._order(), "epoch": self._epoch, "position": self._position}

    def _order(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "num_rows": self._num_rows, "dataset": self._dataset}

    def load_state_dict(self, state: State) -> None:
        """Continue where a cursor over the same rows was. ConfigError for another dataset, seed or order, unless it
        `restarts`."""
        if state.keys() != self.state_dict().keys():
            raise CheckpointError(f"the checkpoint has no data position: it holds {', '.join(state)}")
        for name, new in self._order().items():
            if (old := state[name]) != new:
                is_setting = name in ("seed", "shuffle")
                what = f"data.{name} is {new}" if is_setting else f"the training rows have changed: {name} is {new}"
                what = f"{what}, but the checkpoint was saved with {old}"
                if self._restarts:
                    logging.getLogger(__name__).warning("%s; trainer.resume_changed=true: a new epoch begins", what)
                    self._epoch, self._position = state["epoch"] + 1, 0
                    return
                back = f"set data.{name}={old}" if is_setting else "train on the same rows"
                others = "set trainer.resume_changed=true for a new epoch, or trainer.resume_mode=disable to start over"
                raise ConfigError(f"{what}; {back}, {others}")
        if not (0 <= state["position"] <= self._num_rows and state["epoch"] >= 0):
            raise CheckpointError(f"the checkpoint's data position is out of range: {dict(state)}")
        self._epoch, self._position = state["epoch"], state["position"]
