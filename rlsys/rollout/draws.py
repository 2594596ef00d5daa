"""Our sampling inside another engine's sampler: its rows, what each draws with, and a log of what was drawn.

An engine that lets a hook see its logits draws our tokens: with the counter-based uniforms of `rlsys.rollout.sampling`
they do not depend on the batch, and both log-probabilities of a token cost one softmax and no sort over the vocabulary.
Letters: N rows, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsys.rollout.sampling import Sampling, row_keys, sample_tokens
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


class DrawLog:
    """Tokens and log-probabilities by request, kept on the device until they are asked for."""

    def __init__(self) -> None:
        self._steps: list[tuple[list[int], Tensor]] = []
        self._drawn: dict[int, dict[int, tuple[float, float, float, float]]] = {}

    def add(self, numbers: list[int], drawn: Tensor) -> None:
        """Note a step: requests, and (N, 5) place in the answer, token, full, sampled, finite in float64."""
        self._steps.append((numbers, drawn))

    def take(self, numbers: Iterable[int]) -> dict[int, Answer]:
        """The answers of these requests, which are forgotten; of two draws at one place the later counts."""
        if self._steps:
            rows = torch.cat([drawn for _, drawn in self._steps]).tolist()
            keys = [number for ids, _ in self._steps for number in ids]
            self._steps.clear()
            for number, (place, *row) in zip(keys, rows, strict=True):
                if place >= 0:  # below are draws of an engine that reads a long prompt in parts
                    self._drawn.setdefault(number, {})[int(place)] = tuple(row)
        return {number: _answer(self._drawn.pop(number, {})) for number in numbers}


def _answer(drawn: Mapping[int, tuple[float, float, float, float]]) -> Answer:
    rows = [drawn[place] for place in sorted(drawn)]
    return Answer(
        tokens=tuple(int(row[0]) for row in rows),
        full_logprobs=tuple(row[1] for row in rows),
        sampled_logprobs=tuple(row[2] for row in rows),
        finite=all(row[3] for row in rows),
    )


class RowSampler:
    """Draws for the rows of an engine's batch. `set_rows` when the rows change, `draw` at every step."""

    def __init__(self, engine_seed: int, device: torch.device) -> None:
        self.engine_seed, self.device = engine_seed, device
        self.log = DrawLog()
        self._rows: list[DrawParams] = []

    def set_rows(self, rows: Sequence[DrawParams]) -> None:
        self._rows = list(rows)
        device = self.device
        temperatures, top_ks = [row.temperature for row in rows], [row.top_k for row in rows]
        self._how = Sampling(
            keys=row_keys(self.engine_seed, [row.seed for row in rows]).to(device),
            temperature=torch.tensor(temperatures, device=device),
            top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device),
            top_k=torch.tensor(top_ks, device=device),
            scaled=any(t not in (0.0, 1.0) for t in temperatures),
            any_greedy=0.0 in temperatures,
            any_top_p=any(row.top_p < 1 for row in rows),
            max_top_k=max(top_ks, default=-1),
        )
        self.prompt_lengths = torch.tensor([row.prompt_length for row in rows], device=device)
        self._min_new = torch.tensor([row.min_new_tokens for row in rows], device=device)
        early = any(row.min_new_tokens > 0 for row in rows)
        self._stops = torch.tensor(_stop_table(rows), device=device) if early else None

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
        return torch.where((num_drawn < self._min_new)[:, None], self._stops, -1)


def _stop_table(rows: Sequence[DrawParams]) -> list[list[int]]:
    """The stop ids of each row that has a shortest length, the first repeated to equal width; -1 elsewhere."""
    stops = [row.stop_ids if row.min_new_tokens > 0 else () for row in rows]
    width = max(1, *map(len, stops))
    return [[*ids, *[ids[0] if ids else -1] * (width - len(ids))] for ids in stops]


def force_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logits (N, V), changed in place so that greedy decoding takes `tokens` (N,)."""
    return logits.scatter_(1, tokens[:, None], FORCED)
