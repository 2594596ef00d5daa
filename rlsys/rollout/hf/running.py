"""The running rows of a decode loop as tensors: their sampling parameters, sampled tokens and limits.

Letters: N running rows, R longest completion, S stop ids, C cache columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlsys.rollout.base import QueuedRequest
from rlsys.rollout.sampling.sample import NO_TOKEN, BatchFlags, BatchSampling, SampledTokens, row_keys, stop_id_table
from rlsys.types import Finish, ResponseDelta


class RunningRows:
    """Dense rows: new ones are appended, and the last ones replace removed ones.

    Tensors (N, ...): last_tokens and positions (the last token of each sequence and its absolute position), starts (its
    first cache column), num_new, max_new, min_new, keys, temperature, top_p, top_k, stops (S), and what was sampled:
    tokens, full and sampled (R).
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.queue: list[QueuedRequest] = []
        self.tensors: dict[str, Tensor] = {}
        self.mask = torch.empty(0)
        self.flags = BatchFlags()

    @property
    def count(self) -> int:
        return len(self.queue)

    def add(self, queue: Sequence[QueuedRequest], starts: Tensor) -> None:
        """Append rows whose prompts are in the cache and whose first token is not sampled yet."""
        new = {name: value.to(self.device) for name, value in _initial(queue, self.seed).items()}
        new["starts"] = starts
        self.tensors = {name: _cat_rows(self.tensors[name], new[name]) for name in new} if self.queue else new
        self.queue += queue
        self.flags = BatchFlags.of([queued.request.gconfig for queued in self.queue])

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Remove rows; returns the (from, to) moves by which the last rows replaced them."""
        gone = set(rows)
        left = self.count - len(gone)
        movers = [row for row in range(left, self.count) if row not in gone]
        moves = list(zip(movers, sorted(row for row in gone if row < left), strict=True))
        for source, target in moves:
            self.queue[target] = self.queue[source]
            self.mask[target] = self.mask[source]
            for value in self.tensors.values():
                value[target] = value[source]
        del self.queue[left:]
        self.tensors = {name: value[:left] for name, value in self.tensors.items()}
        self.flags = BatchFlags.of([queued.request.gconfig for queued in self.queue])
        return moves

    def set_mask(self, num_columns: int, hidden: float, dtype: torch.dtype) -> None:
        """The additive mask (N, 1, 1, C) that hides the columns before each row's start."""
        columns = torch.arange(num_columns, device=self.device)
        self.mask = torch.where(columns < self.tensors["starts"][:, None], hidden, 0.0).to(dtype)[:, None, None]

    def most_left(self) -> int:
        """The largest number of tokens that a row may still sample."""
        return int((self.tensors["max_new"] - self.tensors["num_new"]).max())

    def sampling(self, which: slice) -> BatchSampling:
        return BatchSampling(
            keys=self.tensors["keys"][which],
            temperature=self.tensors["temperature"][which],
            top_p=self.tensors["top_p"][which],
            top_k=self.tensors["top_k"][which],
            flags=self.flags,
        )

    def banned(self, which: slice) -> Tensor | None:
        """Stop ids (n, S) of the rows that may not end yet, -1 in the other places; None if there is no such row."""
        if not self.flags.any_min_new:
            return None
        early = self.tensors["num_new"][which] < self.tensors["min_new"][which]
        return torch.where(early[:, None], self.tensors["stops"][which], NO_TOKEN)

    def append(self, sampled: SampledTokens, which: slice) -> tuple[Tensor, Tensor]:
        """Append the sampled tokens; returns which of the rows hit a stop id and which are full (n,) bool."""
        t = {name: value[which] for name, value in self.tensors.items()}
        at = t["num_new"][:, None]
        t["tokens"].scatter_(1, at, sampled.tokens[:, None])
        t["full"].scatter_(1, at, sampled.full_logprobs[:, None])
        t["sampled"].scatter_(1, at, sampled.sampled_logprobs[:, None])
        t["last_tokens"].copy_(sampled.tokens)
        t["positions"] += 1
        t["num_new"] += 1
        return (t["stops"] == sampled.tokens[:, None]).any(1), t["num_new"] >= t["max_new"]

    def take(self, ended: Mapping[int, Finish], version: int) -> list[ResponseDelta]:
        """What was sampled and not taken yet: of the rows that ended, or of all rows if none has."""
        if not self.queue:
            return []
        num_new, num_taken = (self.tensors[name].tolist() for name in ("num_new", "num_taken"))
        rows = list(ended) or [row for row in range(self.count) if num_new[row] > num_taken[row]]
        if not rows:
            return []
        first, end = min(num_taken[row] for row in rows), max(num_new[row] for row in rows)
        names = ("tokens", "full", "sampled")
        columns = [self.tensors[name][rows, first:end].tolist() for name in names]
        self.tensors["num_taken"][rows] = self.tensors["num_new"][rows]
        deltas = []
        for at, row in enumerate(rows):
            new = slice(num_taken[row] - first, num_new[row] - first)
            tokens, full, sampled = (tuple(values[at][new]) for values in columns)
            versions = (version,) * len(tokens)
            deltas.append(ResponseDelta(self.queue[row].rid, tokens, full, sampled, versions, ended.get(row)))
        return deltas


def _initial(queue: Sequence[QueuedRequest], seed: int) -> dict[str, Tensor]:
    params = [queued.request.gconfig for queued in queue]
    num_rows, longest = len(queue), max(queued.max_new_tokens for queued in queue)
    return {
        "last_tokens": torch.zeros(num_rows, dtype=torch.int64),
        "positions": torch.tensor([len(queued.request.input_ids) - 1 for queued in queue]),
        "num_new": torch.zeros(num_rows, dtype=torch.int64),
        "num_taken": torch.zeros(num_rows, dtype=torch.int64),
        "max_new": torch.tensor([queued.max_new_tokens for queued in queue]),
        "min_new": torch.tensor([p.min_new_tokens for p in params]),
        "keys": row_keys(seed, [p.seed for p in params]),
        "temperature": torch.tensor([p.temperature for p in params]),
        "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float64),
        "top_k": torch.tensor([p.top_k for p in params]),
        "stops": stop_id_table([queued.stop_ids for queued in queue]),
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
    """Repeat the last column: the row's last stop id, or token columns that are not read yet."""
    return torch.cat([rows, rows[:, -1:].expand(-1, width - rows.shape[1])], 1)
