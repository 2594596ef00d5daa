"""Samplers of verl's interface: a user-defined class gives the order of the training rows."""

import copy
import threading
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from rlsys.config.schema.data import DataConfig
from rlsys.data.cursor import BatchRows, Cursor
from rlsys.interfaces import State
from rlsys.protocol import DataProto
from rlsys.utils.errors import ConfigError
from rlsys.utils.plugins import load_from_file

SAMPLER_LOCK = threading.RLock()
"""Held while a sampler draws, learns or gives its state: an asynchronous run draws in a thread of its own."""


class AbstractSampler(Sampler[int]):
    """Made with the rows and the section `data`; each pass over it is an epoch and yields positions of rows."""

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        raise NotImplementedError


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from every batch that was trained on."""

    def update(self, batch: DataProto) -> None:
        """Take in a batch after its step, with its scores and advantages."""
        raise NotImplementedError


class SamplerCursor(Cursor):
    """A cursor whose epochs are passes over a sampler, each without the rest that fills no batch.

    A resumed run restores the sampler by its own `state_dict`; without one it draws the rows of the pass again.
    PyTorch's generator is seeded before each batch, so that samplers without one of their own can be resumed, too.
    """

    def __init__(self, sampler: Sampler[int], num_rows: int, **options: Any) -> None:
        super().__init__(num_rows, **options)
        self._sampler = sampler
        self._pass: Iterator[int] | None = None

    def next(self) -> BatchRows:
        """The next batch; ConfigError if a pass is shorter than a batch or yields positions that no row has."""
        rows = self._take(self._batch_size)
        if len(rows) < self._batch_size:
            self._epoch, self._position, self._pass = self._epoch + 1, 0, None
            rows = self._take(self._batch_size)
        if len(rows) < self._batch_size or not all(0 <= row < self._num_rows for row in rows):
            name, wanted = type(self._sampler).__name__, f"{self._batch_size} positions below {self._num_rows}"
            raise ConfigError(f"data.sampler.class_name={name} yields {rows}; a pass must have at least {wanted}")
        self._position += self._batch_size
        return BatchRows(self._epoch, rows)

    def _take(self, size: int) -> tuple[int, ...]:
        with SAMPLER_LOCK, torch.random.fork_rng(devices=[]):
            place = [self._seed, self._epoch, self._position]
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
            self._pass = self._pass or iter(self._sampler)
            return tuple(map(int, islice(self._pass, size)))

    def state_dict(self) -> dict[str, object]:
        """As a cursor's, with the sampler's own state, which must be plain values."""
        with SAMPLER_LOCK:
            own = copy.deepcopy(self._sampler.state_dict()) if hasattr(self._sampler, "state_dict") else None
        return {**super().state_dict(), "sampler": own}

    def load_state_dict(self, state: State) -> None:
        """Continue where a cursor over the same rows with such a sampler was."""
        super().load_state_dict(state)
        done, self._pass = self._position, None
        if done and hasattr(self._sampler, "load_state_dict"):
            self._sampler.load_state_dict(state["sampler"])
            return
        self._position = 0
        while self._position < done:
            self._position += len(self._take(min(self._batch_size, done - self._position)))


def create_rl_sampler(data_config: DataConfig, dataset: Sized) -> Sampler[int] | None:
    """The sampler of `data.sampler` over the rows, None where there is none; ConfigError for another class."""
    path, name = data_config.sampler.class_path, data_config.sampler.class_name
    if path is None or name is None:
        return None
    key = f"data.sampler.class_name={name}"
    sampler = load_from_file(path, name, key="data.sampler.class_path")(data_source=dataset, data_config=data_config)
    if not isinstance(sampler, Sampler) or not isinstance(sampler, Sized):
        raise ConfigError(f"{key}: it must be an rlsys.data.rl_sampler.AbstractSampler with a length")
    if len(sampler) != len(dataset):
        raise ConfigError(f"{key}: its length is {len(sampler)}, that of the rows {len(dataset)}")
    return sampler
