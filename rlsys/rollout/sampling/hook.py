"""Our sampling inside another engine's sampler: its rows, and what each draws with.

An engine that lets a hook see its logits draws our tokens: with the counter-based uniforms of `sampling.sample`
they do not depend on the batch, and both log-probabilities of a token cost one softmax and no sort over the vocabulary.
Letters: N rows, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsys.rollout.base import Ticket
from rlsys.rollout.sampling.log import DrawLog
from rlsys.rollout.sampling.sample import NO_TOKEN, Flags, Sampling, row_keys, sample_tokens, stop_table

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


class RowSampler:
    """Draws for the rows of an engine's batch: `set_rows` when the rows change, `force` at every step.

    On GPUs a kernel draws the rows that nothing truncates; a row's way of drawing does not depend on the others'.
    """

    def __init__(self, engine_seed: int, device: torch.device, *, logged: bool = True) -> None:
        self.engine_seed, self.device = engine_seed, device
        self.log, self._logged = DrawLog(), logged
        self._numbers: list[int] = []

    def set_rows(self, rows: Sequence[DrawParams]) -> None:
        self._numbers = [row.number for row in rows]
        by_torch = [at for at, row in enumerate(rows) if _is_truncated(row) or self.device.type != "cuda"]
        self._plain = PlainRows(self.engine_seed, rows, self.device) if len(by_torch) < len(rows) else None
        chosen = [rows[at] for at in by_torch]
        self._others = TorchRows(self.engine_seed, chosen, self.device) if by_torch or not rows else None
        self._index = torch.tensor(by_torch).to(self.device) if self._plain and self._others else None

    def force(self, logits: Tensor, positions: Tensor) -> None:
        """Change the logits (N, V) so that greedy decoding takes what we draw at the absolute `positions` (N,)."""
        if self._plain is None:
            assert self._others is not None, "set_rows comes first"
            drawn = self._others.force(logits, positions)
        else:
            drawn = self._plain.force(logits, positions)
            if self._others is not None:
                at = self._index
                some = logits[at]
                drawn[at] = self._others.force(some, positions[at])
                logits[at] = some
        if self._logged:
            self.log.add(self._numbers, drawn)


def _is_truncated(row: DrawParams) -> bool:
    """Whether more is to be done for a draw than one softmax."""
    return row.top_p < 1 or row.top_k > 0 or row.min_new_tokens > 0


class TorchRows:
    """Rows that torch draws, each with whatever it asks for."""

    def __init__(self, engine_seed: int, rows: Sequence[DrawParams], device: torch.device) -> None:
        self._how = Sampling(
            keys=row_keys(engine_seed, [row.seed for row in rows]).to(device),
            temperature=torch.tensor([row.temperature for row in rows], device=device),
            top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device),
            top_k=torch.tensor([row.top_k for row in rows], device=device),
            flags=Flags.of(rows),
        )
        self._starts = torch.tensor([row.prompt_length for row in rows], device=device)
        self._min_new = torch.tensor([row.min_new_tokens for row in rows], device=device)
        stops = [row.stop_ids if row.min_new_tokens > 0 else () for row in rows]
        self._stops = stop_table(stops).to(device) if self._how.flags.any_min_new else None

    def force(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Place, token, full, sampled and finite (N, 5) of each row's draw, whose logit now wins every argmax."""
        places = positions - self._starts
        drawn = sample_tokens(logits, positions, self._how, self._banned(places))
        logits.scatter_(1, drawn.tokens[:, None], FORCED)
        columns = (places, drawn.tokens, drawn.full_logprobs, drawn.sampled_logprobs, drawn.finite)
        return torch.stack([column.double() for column in columns], 1)

    def _banned(self, places: Tensor) -> Tensor | None:
        """Stop ids (N, S) of the rows that may not end yet, -1 elsewhere; None when there is no such row."""
        if self._stops is None:
            return None
        return torch.where((places < self._min_new)[:, None], self._stops, NO_TOKEN)


class PlainRows:
    """The rows of a batch that a kernel draws; those that are truncated it leaves alone."""

    def __init__(self, engine_seed: int, rows: Sequence[DrawParams], device: torch.device) -> None:
        heat = torch.tensor([row.temperature for row in rows], dtype=torch.float64).view(torch.int64)
        starts = torch.tensor([row.prompt_length for row in rows])
        plain = torch.tensor([not _is_truncated(row) for row in rows]).long()
        keys = row_keys(engine_seed, [row.seed for row in rows])
        table = torch.stack([keys, heat, starts, plain]).pin_memory().to(device, non_blocking=True)
        self._keys, self._starts, self._plain = table[0], table[2], table[3]
        self._temperature = table[1].view(torch.float64)

    def force(self, logits: Tensor, positions: Tensor) -> Tensor:
        """As `TorchRows.force`."""
        from rlsys.rollout.sampling.kernel import draw_rows

        return draw_rows(
            logits,
            positions,
            plain=self._plain,
            keys=self._keys,
            temperature=self._temperature,
            starts=self._starts,
            forced=FORCED,
        )
