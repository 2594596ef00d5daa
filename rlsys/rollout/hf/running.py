"""The running rows of a decode loop as tensors: what each draws with, what it has drawn, when it ends.

Letters: N running rows, R longest completion, S stop ids, C cache columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsys.rollout.base import Ticket
from rlsys.rollout.sampling.sample import NO_TOKEN, Drawn, Flags, Sampling, row_keys, stop_table
from rlsys.types import Finish, ModelRequest, ModelResponse


class RunningRows:
    """Rows are dense: they are added behind the last one, and a removed row's place is taken by the last one.

    Tensors (N, ...): last_tokens and positions (the last token of each sequence and its absolute position), starts (its
    first cache column), num_new, max_new, min_new, keys, temperature, top_p, top_k, stops (S), and what was drawn:
    tokens, full and sampled (R).
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.tickets: list[Ticket] = []
        self.t: dict[str, Tensor] = {}
        self.mask = torch.empty(0)
        self.flags = Flags()

    @property
    def count(self) -> int:
        return len(self.tickets)

    def add(self, tickets: Sequence[Ticket], starts: Tensor) -> None:
        """Append rows whose prompts are in the cache; each awaits its first token."""
        new = {name: value.to(self.device) for name, value in _initial(tickets, self.seed).items()}
        new["starts"] = starts
        self.t = {name: _cat_rows(self.t[name], new[name]) for name in new} if self.tickets else new
        self.tickets += tickets
        self.flags = Flags.of([ticket.request.gconfig for ticket in self.tickets])

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drop rows; returns the (from, to) moves by which the last rows took the free places."""
        gone = set(rows)
        left = self.count - len(gone)
        movers = [row for row in range(left, self.count) if row not in gone]
        moves = list(zip(movers, sorted(row for row in gone if row < left), strict=True))
        for source, target in moves:
            self.tickets[target] = self.tickets[source]
            self.mask[target] = self.mask[source]
            for value in self.t.values():
                value[target] = value[source]
        del self.tickets[left:]
        self.t = {name: value[:left] for name, value in self.t.items()}
        self.flags = Flags.of([ticket.request.gconfig for ticket in self.tickets])
        return moves

    def set_mask(self, num_columns: int, hidden: float, dtype: torch.dtype) -> None:
        """The additive mask (N, 1, 1, C) that hides the columns before each row's start."""
        columns = torch.arange(num_columns, device=self.device)
        self.mask = torch.where(columns < self.t["starts"][:, None], hidden, 0.0).to(dtype)[:, None, None]

    def shift_starts(self, columns: int) -> None:
        if self.tickets:
            self.t["starts"] += columns

    def first_start(self, otherwise: int) -> int:
        """The first cache column that a running row uses."""
        return int(self.t["starts"].min()) if self.tickets else otherwise

    def most_left(self) -> int:
        """The most tokens that any row may still draw."""
        return int((self.t["max_new"] - self.t["num_new"]).max())

    def sampling(self, which: slice) -> Sampling:
        return Sampling(
            keys=self.t["keys"][which],
            temperature=self.t["temperature"][which],
            top_p=self.t["top_p"][which],
            top_k=self.t["top_k"][which],
            flags=self.flags,
        )

    def banned(self, which: slice) -> Tensor | None:
        """Stop ids (n, S) of the rows that may not end yet, -1 elsewhere; None when there is no such row."""
        if not self.flags.any_min_new:
            return None
        early = self.t["num_new"][which] < self.t["min_new"][which]
        return torch.where(early[:, None], self.t["stops"][which], NO_TOKEN)

    def append(self, drawn: Drawn, which: slice) -> tuple[Tensor, Tensor]:
        """Note the drawn tokens; returns which of the rows met a stop id and which are full (n,) bool."""
        t = {name: value[which] for name, value in self.t.items()}
        at = t["num_new"][:, None]
        t["tokens"].scatter_(1, at, drawn.tokens[:, None])
        t["full"].scatter_(1, at, drawn.full_logprobs[:, None])
        t["sampled"].scatter_(1, at, drawn.sampled_logprobs[:, None])
        t["last_tokens"].copy_(drawn.tokens)
        t["positions"] += 1
        t["num_new"] += 1
        return (t["stops"] == drawn.tokens[:, None]).any(1), t["num_new"] >= t["max_new"]

    def response(self, row: int, why: Finish, version: int) -> ModelResponse:
        num_new = int(self.t["num_new"][row])
        tokens, full, sampled = (self.t[name][row, :num_new].tolist() for name in ("tokens", "full", "sampled"))
        request = self.tickets[row].request
        return ModelResponse(
            request.rid, request.input_ids, tuple(tokens), tuple(full), tuple(sampled), (version,) * num_new, why
        )


def empty_response(request: ModelRequest, why: Finish) -> ModelResponse:
    """The answer to a request that got no token."""
    return ModelResponse(request.rid, request.input_ids, (), (), (), (), why)


def _initial(tickets: Sequence[Ticket], seed: int) -> dict[str, Tensor]:
    params = [ticket.request.gconfig for ticket in tickets]
    num_rows, longest = len(tickets), max(ticket.max_new_tokens for ticket in tickets)
    return {
        "last_tokens": torch.zeros(num_rows, dtype=torch.int64),
        "positions": torch.tensor([len(ticket.request.input_ids) - 1 for ticket in tickets]),
        "num_new": torch.zeros(num_rows, dtype=torch.int64),
        "max_new": torch.tensor([ticket.max_new_tokens for ticket in tickets]),
        "min_new": torch.tensor([p.min_new_tokens for p in params]),
        "keys": row_keys(seed, [p.seed for p in params]),
        "temperature": torch.tensor([p.temperature for p in params]),
        "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float64),
        "top_k": torch.tensor([p.top_k for p in params]),
        "stops": stop_table([ticket.stop_ids for ticket in tickets]),
        "tokens": torch.zeros(num_rows, longest, dtype=torch.int64),
        "full": torch.zeros(num_rows, longest),
        "sampled": torch.zeros(num_rows, longest),
    }


def _cat_rows(old: Tensor, new: Tensor) -> Tensor:
    """The rows of both, as wide as the wider one."""
    if old.ndim == 1:
        return torch.cat([old, new])
    width = max(old.shape[1], new.shape[1])
    return torch.cat([_widen(old, width), _widen(new, width)])


def _widen(rows: Tensor, width: int) -> Tensor:
    """Repeat the last column: of stop ids the same row's id again, of drawn tokens a place that is not read yet."""
    return torch.cat([rows, rows[:, -1:].expand(-1, width - rows.shape[1])], 1)
