"""The running rows of a decode loop. Letters: N running rows, V vocabulary, C cache columns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsys.rollout.base import RunningRequest
from rlsys.rollout.sampling.hook import RowSampler, SampleSpec


class RunningRows:
    """Dense rows: new ones are appended, and the last ones replace removed ones.

    Tensors (N,): last_tokens and positions (the last token of each sequence and its absolute position), starts (its
    first cache column), shifts (what the model's position has beside the absolute one), num_left (tokens that it may
    still get). `mask` (N, 1, 1, C) hides the columns before starts.
    """

    def __init__(self, sampler: RowSampler, device: torch.device) -> None:
        self.sampler, self.device = sampler, device
        self.requests: list[RunningRequest] = []
        self.tensors: dict[str, Tensor] = {}
        self.mask = torch.empty(0)
        self._sampled: list[RunningRequest] = []

    @property
    def count(self) -> int:
        return len(self.requests)

    def add(self, requests: Sequence[RunningRequest], starts: Tensor, shifts: Tensor) -> None:
        """Append rows whose prompts are in the cache and whose first token is not sampled yet."""
        columns = {
            "last_tokens": [0] * len(requests),
            "positions": [len(one.request.input_ids) - 1 for one in requests],
            "num_left": [one.max_new_tokens for one in requests],
        }
        new = {name: torch.tensor(values, device=self.device) for name, values in columns.items()}
        new |= {"starts": starts, "shifts": shifts}
        self.tensors = {name: torch.cat([self.tensors[name], new[name]]) for name in new} if self.requests else new
        self.requests += requests

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Remove rows; returns the (from, to) moves by which the last rows replaced them."""
        gone = set(rows)
        left = self.count - len(gone)
        movers = [row for row in range(left, self.count) if row not in gone]
        moves = list(zip(movers, sorted(row for row in gone if row < left), strict=True))
        for source, target in moves:
            self.requests[target] = self.requests[source]
            self.mask[target] = self.mask[source]
            for value in self.tensors.values():
                value[target] = value[source]
        del self.requests[left:]
        self.tensors = {name: value[:left] for name, value in self.tensors.items()}
        return moves

    def set_mask(self, num_columns: int, hidden: float, dtype: torch.dtype) -> None:
        columns = torch.arange(num_columns, device=self.device)
        self.mask = torch.where(columns < self.tensors["starts"][:, None], hidden, 0.0).to(dtype)[:, None, None]

    def sample(self, logits: Tensor, which: slice) -> list[int]:
        """Sample a token for each of these rows from logits (N, V); returns the rows that end with it."""
        if self._sampled != self.requests[which]:
            self._sampled = self.requests[which]
            self.sampler.set_rows([SampleSpec.of(one) for one in self._sampled])
        t = {name: value[which] for name, value in self.tensors.items()}
        t["positions"] += 1
        t["num_left"] -= 1
        t["last_tokens"].copy_(self.sampler.force(logits, t["positions"])[:, 1])
        drawn = zip(self._sampled, *torch.stack([t["last_tokens"], t["num_left"]]).tolist(), strict=True)
        ends = [left == 0 or token in one.stop_ids for one, token, left in drawn]
        return [row for row, ended in enumerate(ends, start=which.start) if ended]
