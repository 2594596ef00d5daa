"""What was drawn, by request: kept where it was drawn, copied to the host beside the work, looked up when asked for.

Letters: N rows of a step, K requests, T tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

FIELDS = 4
"""Token, full, sampled, finite."""
STEPS_HELD = 64
"""Steps after which copies that have arrived are put in order, so that they do not pile up."""


@dataclass(frozen=True)
class Answer:
    """What was drawn for one request, in the order of its positions."""

    tokens: tuple[int, ...]
    full_logprobs: tuple[float, ...]
    sampled_logprobs: tuple[float, ...]
    finite: bool

    def first(self, num: int) -> Answer:
        """The answer cut to its first tokens."""
        return replace(
            self,
            tokens=self.tokens[:num],
            full_logprobs=self.full_logprobs[:num],
            sampled_logprobs=self.sampled_logprobs[:num],
        )


def answers_of(counts: np.ndarray, table: np.ndarray) -> list[Answer]:
    """The answers (K) out of what `DrawLog.take` returns."""
    tokens = table[:, 0].astype(np.int64).tolist()
    full, sampled = table[:, 1].tolist(), table[:, 2].tolist()
    ends = np.cumsum(counts).tolist()
    return [
        Answer(
            tuple(tokens[end - count : end]),
            tuple(full[end - count : end]),
            tuple(sampled[end - count : end]),
            bool(table[end - count : end, -1].all()),
        )
        for count, end in zip(counts.tolist(), ends, strict=True)
    ]


@dataclass
class _Step:
    """Requests (None: nobody asks any more), and what they drew, on the host once `arrived` has."""

    numbers: Sequence[int | None]
    drawn: Tensor
    arrived: Any = None

    def is_here(self) -> bool:
        return self.arrived is None or self.arrived.query()


class DrawLog:
    """Tokens and log-probabilities by request.

    On the host a request has a row of a table (S, T, 4): token, full, sampled, finite by its place in the answer, NaN
    where nothing was drawn.
    """

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._table = np.zeros((0, 0, FIELDS))
        self._lengths = np.zeros(0, np.int64)

    def add(self, numbers: Sequence[int], drawn: Tensor) -> None:
        """Note a step: requests, and (N, 5) place in the answer, token, full, sampled, finite in float64."""
        self._steps.append(_on_its_way(numbers, drawn) if drawn.is_cuda else _Step(numbers, drawn))
        if len(self._steps) >= STEPS_HELD:
            self._bring()

    def take(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens each of these requests drew (K,), and all of them (T, 4); they are forgotten.

        Of two draws at one place the later counts. A step whose copy has not arrived was begun ahead of what its engine
        has told, so what it drew for requests that have ended is for nobody.
        """
        self._bring()
        if self._steps:
            ended = set(numbers)
            for step in self._steps:
                step.numbers = [None if number in ended else number for number in step.numbers]
        known = [number in self._slots for number in numbers]
        slots = np.array([self._slots.pop(number) for number in numbers if number in self._slots], np.int64)
        held = self._table[slots, : self._lengths[slots].max(initial=0)]
        drawn = ~np.isnan(held[:, :, 0])
        counts = np.zeros(len(numbers), np.int64)
        counts[known] = drawn.sum(1)
        self._table[slots] = np.nan
        self._lengths[slots] = 0
        self._free += slots.tolist()
        return counts, held[drawn]

    def _bring(self) -> None:
        """Put into the table what has arrived on the host."""
        here: list[_Step] = []
        while self._steps and self._steps[0].is_here():
            here.append(self._steps.popleft())
        if not here:
            return
        slots = np.concatenate(self._slots_of([step.numbers for step in here]))
        rows = torch.cat([step.drawn for step in here]).numpy()
        places = rows[:, 0].astype(np.int64)
        kept = (places >= 0) & (slots >= 0)  # places below 0 are draws of an engine that reads a long prompt in parts
        rows, slots, places = rows[kept], slots[kept], places[kept]
        self._grow(int(places.max(initial=-1)) + 1)
        self._table[slots, places] = rows[:, 1:]
        np.maximum.at(self._lengths, slots, places + 1)

    def _slots_of(self, steps: Sequence[Sequence[int | None]]) -> list[np.ndarray]:
        """The table's rows of each step's requests, -1 for nobody; most steps have the rows of the one before."""
        found: list[np.ndarray] = []
        for at, numbers in enumerate(steps):
            same = at > 0 and numbers is steps[at - 1]
            found.append(found[-1] if same else np.array([self._slot(number) for number in numbers], np.int64))
        return found

    def _slot(self, number: int | None) -> int:
        if number is None:
            return -1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = self._free.pop() if self._free else len(self._slots)
        return slot

    def _grow(self, width: int) -> None:
        """Room for all slots and answers of this many tokens, twice the need where there is too little."""
        slots, places, _ = self._table.shape
        needed = len(self._slots) + len(self._free)
        if needed > slots or width > places:
            grown = np.full((max(slots, 2 * needed), max(places, 2 * width), FIELDS), np.nan)
            grown[:slots, :places] = self._table
            self._table = grown
            self._lengths = np.pad(self._lengths, (0, len(grown) - len(self._lengths)))


def _on_its_way(numbers: Sequence[int], drawn: Tensor) -> _Step:
    """A step whose draws are copied to the host when the device comes to it."""
    host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
    host.copy_(drawn, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(drawn.device))
    return _Step(numbers, host, arrived)
