"""Our sampling inside another engine's sampler: its rows, what each draws with, and a log of what was drawn.

An engine that lets a hook see its logits draws our tokens: with the counter-based uniforms of `rlsys.rollout.sampling`
they do not depend on the batch, and both log-probabilities of a token cost one softmax and no sort over the vocabulary.
Letters: N rows, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.rollout.sampling import NO_TOKEN, Flags, Sampling, row_keys, sample_tokens, stop_table
from rlsys.rollout.serving import Ticket

FORCED = 3.0e38
"""A logit that wins every argmax."""


@dataclass(frozen=True)
class DrawParams:
    """What one request draws with; `number` names it in the log, `prompt_length` places its first token."""

    number: int
    prompt_length: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_new_tokens: int
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, ticket: Ticket, number: int) -> DrawParams:
        params = ticket.request.gconfig
        return cls(
            number,
            len(ticket.request.input_ids),
            params.seed,
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_new_tokens,
            ticket.stop_ids,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "stop_ids": list(self.stop_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrawParams:
        fields: dict[str, Any] = {**values, "stop_ids": tuple(values["stop_ids"])}
        return cls(**fields)


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


class DrawLog:
    """Tokens and log-probabilities by request, kept on the device until they are asked for.

    On the host a request has a row of a table (S, T, 4): token, full, sampled, finite by its place in the answer, NaN
    where nothing was drawn.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[list[int], Tensor]] = []
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._table = np.zeros((0, 0, 4))
        self._lengths = np.zeros(0, np.int64)

    def add(self, numbers: list[int], drawn: Tensor) -> None:
        """Note a step: requests, and (N, 5) place in the answer, token, full, sampled, finite in float64."""
        self._steps.append((numbers, drawn))

    def take(self, numbers: Iterable[int]) -> dict[int, Answer]:
        """The answers of these requests, which are forgotten; of two draws at one place the later counts."""
        self._bring()
        return {number: self._take(number) for number in numbers}

    def _bring(self) -> None:
        """Move what was noted to the host."""
        if not self._steps:
            return
        rows = torch.cat([drawn for _, drawn in self._steps]).cpu().numpy()
        slots = np.array([self._slot(number) for numbers, _ in self._steps for number in numbers])
        self._steps.clear()
        places = rows[:, 0].astype(np.int64)
        kept = places >= 0  # below are draws of an engine that reads a long prompt in parts
        slots, places = slots[kept], places[kept]
        self._grow(int(places.max(initial=-1)) + 1)
        self._table[slots, places] = rows[kept, 1:]
        np.maximum.at(self._lengths, slots, places + 1)

    def _slot(self, number: int) -> int:
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = self._free.pop() if self._free else len(self._slots)
        return slot

    def _grow(self, width: int) -> None:
        """Room for all slots and answers of this many tokens, twice the need where there is too little."""
        slots, places, _ = self._table.shape
        needed = len(self._slots) + len(self._free)
        if needed > slots or width > places:
            grown = np.full((max(slots, 2 * needed), max(places, 2 * width), 4), np.nan)
            grown[:slots, :places] = self._table
            self._table = grown
            self._lengths = np.pad(self._lengths, (0, len(grown) - len(self._lengths)))

    def _take(self, number: int) -> Answer:
        slot = self._slots.pop(number, None)
        if slot is None:
            return Answer((), (), (), True)
        held = self._table[slot, : self._lengths[slot]]
        rows = held[~np.isnan(held[:, 0])]
        answer = Answer(
            tokens=tuple(rows[:, 0].astype(np.int64).tolist()),
            full_logprobs=tuple(rows[:, 1].tolist()),
            sampled_logprobs=tuple(rows[:, 2].tolist()),
            finite=bool(rows[:, 3].all()),
        )
        held[:] = np.nan
        self._lengths[slot] = 0
        self._free.append(slot)
        return answer


class RowSampler:
    """Draws for the rows of an engine's batch. `set_rows` when the rows change, `draw` at every step."""

    def __init__(self, engine_seed: int, device: torch.device) -> None:
        self.engine_seed, self.device = engine_seed, device
        self.log = DrawLog()
        self._rows: list[DrawParams] = []

    def set_rows(self, rows: Sequence[DrawParams]) -> None:
        self._rows = list(rows)
        device = self.device
        self._how = Sampling(
            keys=row_keys(self.engine_seed, [row.seed for row in rows]).to(device),
            temperature=torch.tensor([row.temperature for row in rows], device=device),
            top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device),
            top_k=torch.tensor([row.top_k for row in rows], device=device),
            flags=Flags.of(rows),
        )
        self.prompt_lengths = torch.tensor([row.prompt_length for row in rows], device=device)
        self._min_new = torch.tensor([row.min_new_tokens for row in rows], device=device)
        stops = [row.stop_ids if row.min_new_tokens > 0 else () for row in rows]
        self._stops = stop_table(stops).to(device) if self._how.flags.any_min_new else None

    def draw(self, logits: Tensor, num_drawn: Tensor) -> Tensor:
        """The next token (N,) of every row, given how many each has (N,); both log-probabilities go to the log."""
        drawn = sample_tokens(logits, self.prompt_lengths + num_drawn, self._how, self._banned(num_drawn))
        columns = (num_drawn, drawn.tokens, drawn.full_logprobs, drawn.sampled_logprobs, drawn.finite)
        self.log.add([row.number for row in self._rows], torch.stack([c.double() for c in columns], 1))
        return drawn.tokens

    def _banned(self, num_drawn: Tensor) -> Tensor | None:
        """Stop ids (N, S) of the rows that may not end yet, -1 elsewhere; None when there is no such row."""
        if self._stops is None:
            return None
        return torch.where((num_drawn < self._min_new)[:, None], self._stops, NO_TOKEN)


def force_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logits (N, V), changed in place so that greedy decoding takes `tokens` (N,)."""
    return logits.scatter_(1, tokens[:, None], FORCED)
