"""Sampled tokens by request: logged on the device, copied to the host asynchronously, read when a request ends.

Letters: N rows of a step, K requests, T tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

FIELDS = 4
"""Token, full, sampled, finite."""
STEPS_HELD = 64
"""Number of logged steps after which arrived copies are moved into the table."""


def by_request(counts: np.ndarray, table: np.ndarray) -> list[np.ndarray]:
    """The tokens (T, 4) of each of the K requests in what `SampleLog.take` returns."""
    return [table[start:end] for start, end in pairwise([0, *np.cumsum(counts).tolist()])]


@dataclass
class _Step:
    """Requests (None: already ended) and their samples, which are on the host once `arrived` has completed."""

    numbers: Sequence[int | None]
    samples: Tensor
    arrived: torch.cuda.Event | None = None


class SampleLog:
    """Tokens and log-probabilities by request.

    On the host a request has a slot, a row of a table (S, T, 4): token, full, sampled, finite by index in its
    completion, NaN where nothing was sampled. A slot is used again when its request was taken.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._table = np.full((1, 1, FIELDS), np.nan)
        self._lengths = np.zeros(1, np.int64)

    def add(self, numbers: Sequence[int], samples: Tensor) -> None:
        """Log a step: requests, and (N, 5) index in the completion, token, full, sampled, finite in float64."""
        self._steps.append(_copied_to_host(numbers, samples) if samples.is_cuda else _Step(numbers, samples))
        if len(self._steps) >= STEPS_HELD:
            self._store_arrived()

    def take(
        self, numbers: Sequence[int], starts: Sequence[int] | None = None, ends: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Remove these requests; returns their numbers of tokens (K,) and the tokens of all of them in a row (T, 4).

        With `starts` the requests stay, and only their tokens from these indices on are returned; with `ends` only
        those before these indices. Of two samples at one index the later one counts. A step whose copy has not arrived
        was started ahead of the engine's outputs, so its samples for requests that have ended are ignored.
        """
        self._store_arrived()
        slots = np.array([self._slots.get(number, -1) for number in numbers], np.int64)
        lengths = np.where(slots >= 0, self._lengths[slots], 0)
        lengths = np.minimum(lengths, ends) if ends else lengths
        first, last = min(starts or [0]), lengths.max(initial=0)
        table = self._table[slots, first:last]
        index = np.arange(first, last)
        kept = (index >= np.reshape(starts or 0, (-1, 1))) & (index < lengths[:, None]) & ~np.isnan(table[:, :, 0])
        taken = kept.sum(1), table[kept]
        if starts is None:
            ended = set(numbers)
            for step in self._steps:
                step.numbers = [None if number in ended else number for number in step.numbers]
            freed = [self._slots.pop(number) for number in numbers if number in self._slots]
            self._table[freed], self._lengths[freed] = np.nan, 0
            self._free += freed
        return taken

    def _store_arrived(self) -> None:
        """Move the steps that have arrived on the host into the table."""
        arrived: list[_Step] = []
        while self._steps and ((event := self._steps[0].arrived) is None or event.query()):
            arrived.append(self._steps.popleft())
        if not arrived:
            return
        slots = np.concatenate(self._slots_of([step.numbers for step in arrived]))
        rows = torch.cat([step.samples for step in arrived]).numpy()
        indices = rows[:, 0].astype(np.int64)
        kept = (indices >= 0) & (slots >= 0)  # an index below 0 is sampled in the middle of a chunked prefill
        rows, slots, indices = rows[kept], slots[kept], indices[kept]
        self._grow(int(indices.max(initial=-1)) + 1)
        self._table[slots, indices] = rows[:, 1:]
        np.maximum.at(self._lengths, slots, indices + 1)

    def _slots_of(self, steps: Sequence[Sequence[int | None]]) -> list[np.ndarray]:
        """The table's rows of each step's requests, -1 for ended ones; most steps have those of the previous one."""
        slots: list[np.ndarray] = []
        for at, numbers in enumerate(steps):
            same = at > 0 and numbers is steps[at - 1]
            slots.append(slots[-1] if same else np.array([self._slot(number) for number in numbers], np.int64))
        return slots

    def _slot(self, number: int | None) -> int:
        if number is None:
            return -1
        if (slot := self._slots.get(number)) is None:
            slot = self._slots[number] = self._free.pop() if self._free else len(self._slots)
        return slot

    def _grow(self, width: int) -> None:
        """Make room for all slots and completions of `width` tokens, twice what is needed."""
        slots, columns, _ = self._table.shape
        needed = len(self._slots) + len(self._free)
        if needed > slots or width > columns:
            more, wider = max(0, 2 * needed - slots), max(0, 2 * width - columns)
            self._table = np.pad(self._table, [(0, more), (0, wider), (0, 0)], constant_values=np.nan)
            self._lengths = np.pad(self._lengths, (0, more))


def _copied_to_host(numbers: Sequence[int], samples: Tensor) -> _Step:
    """A step whose samples are being copied to the host asynchronously."""
    host = torch.empty(samples.shape, dtype=samples.dtype, pin_memory=True)
    host.copy_(samples, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(samples.device))
    return _Step(numbers, host, arrived)
