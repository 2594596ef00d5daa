"""Our sampling inside another engine's sampler: what its rows sample with, and tokens forced into its logits.

An engine that lets a hook change its logits takes our tokens: with the counter-based uniforms of `sampling.sample` they
do not depend on the batch, and both log-probabilities of a token cost one softmax and no sort over the vocabulary.
Letters: N rows, V vocabulary, S stop ids.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlsys.rollout.base import RunningRequest
from rlsys.rollout.sampling import sample
from rlsys.rollout.sampling.log import SampleLog
from rlsys.types import SamplingParams

SPEC_KEY = "rlsys_sample"
"""The extra argument of a vLLM request that holds its SampleSpec."""
FORCED = 3.0e38
"""A logit above all others, which greedy decoding takes."""


@dataclass(frozen=True)
class SampleSpec:
    """How one request is sampled; `number` identifies it in the log, its first token is at `prompt_length`."""

    number: int
    prompt_length: int
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()

    def __deepcopy__(self, memo: object) -> "SampleSpec":
        """Itself: vLLM copies what a request holds, which took longer than all else of adding it."""
        return self

    @classmethod
    def of(cls, running: RunningRequest) -> "SampleSpec":
        return cls(running.number, len(running.request.input_ids), running.request.gconfig, running.stop_ids)

    @cached_property
    def is_truncated(self) -> bool:
        """Whether sampling it takes more than one softmax."""
        return self.params.top_p < 1 or self.params.top_k > 0 or self.params.min_new_tokens > 0

    @cached_property
    def words(self) -> tuple[int, int, int, int]:
        """Seed, bits of the temperature in float64, length of the prompt, and 1 where it is not truncated, as int64."""
        bits = struct.unpack("q", struct.pack("d", self.params.temperature))[0]
        return sample.signed(self.params.seed), bits, self.prompt_length, int(not self.is_truncated)


UNUSED = SamplingParams(1, temperature=0.0)
"""Of a request whose sampled token is not used."""


class RowSampler:
    """Samples the rows of an engine's batch: call `set_rows` when the rows change, `force` at every step.

    On GPUs a kernel samples the rows without truncation, and torch the others; how a row is sampled does not depend on
    the rest. `_index` are the rows for torch where there are rows for both.
    """

    def __init__(self, engine_seed: int, device: torch.device, *, logged: bool = True) -> None:
        self.engine_seed, self.device = engine_seed, device
        self.log, self.logged = SampleLog(), logged
        self._numbers: list[int] = []

    def set_rows(self, rows: Sequence[SampleSpec]) -> None:
        self._numbers = [row.number for row in rows]
        by_torch = [at for at, row in enumerate(rows) if row.is_truncated or self.device.type != "cuda"]
        self._kernel_rows = KernelRows(self.engine_seed, rows, self.device) if len(by_torch) < len(rows) else None
        chosen = [rows[at] for at in by_torch]
        self._torch_rows = TorchRows(self.engine_seed, chosen, self.device) if by_torch or not rows else None
        self._index = torch.tensor(by_torch).to(self.device) if self._kernel_rows and self._torch_rows else None

    def force(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Change the logits (N, V) so that greedy decoding takes our samples at the absolute `positions` (N,).

        Returns (N, 5) index in the completion, token, full, sampled, finite in float64.
        """
        if self._kernel_rows is None:
            assert self._torch_rows is not None, "set_rows comes first"
            samples = self._torch_rows.force(logits, positions)
        else:
            samples = self._kernel_rows.force(logits, positions)
            if self._torch_rows is not None:
                some = logits[at := self._index]
                samples[at] = self._torch_rows.force(some, positions[at])
                logits[at] = some
        if self.logged:
            self.log.add(self._numbers, samples)
        return samples


class TorchRows:
    """Rows sampled by torch, with any parameters."""

    def __init__(self, engine_seed: int, rows: Sequence[SampleSpec], device: torch.device) -> None:
        params = [row.params for row in rows]
        self._params = sample.BatchSampling(
            keys=sample.row_keys(engine_seed, [one.seed for one in params]).to(device),
            temperature=torch.tensor([one.temperature for one in params], device=device),
            top_p=torch.tensor([one.top_p for one in params], dtype=torch.float64, device=device),
            top_k=torch.tensor([one.top_k for one in params], device=device),
            scaled=any(one.temperature not in (0.0, 1.0) for one in params),
            any_greedy=any(one.temperature == 0 for one in params),
            any_top_p=any(one.top_p < 1 for one in params),
            max_top_k=max((one.top_k for one in params), default=-1),
        )
        self._starts = torch.tensor([row.prompt_length for row in rows], device=device)
        self._min_new = torch.tensor([one.min_new_tokens for one in params], device=device)
        stops = [row.stop_ids if row.params.min_new_tokens > 0 else () for row in rows]
        self._stops = sample.stop_id_table(stops).to(device) if any(one.min_new_tokens > 0 for one in params) else None

    def force(self, logits: Tensor, positions: Tensor) -> Tensor:
        """As `RowSampler.force`."""
        indices = positions - self._starts
        banned = None
        if self._stops is not None:  # ids of the rows that may not end yet
            banned = torch.where((indices < self._min_new)[:, None], self._stops, sample.NO_TOKEN)
        sampled = sample.sample_tokens(logits, positions, self._params, banned)
        logits.scatter_(1, sampled.tokens[:, None], FORCED)
        return torch.stack([column.double() for column in (indices, *sampled)], 1)


class KernelRows:
    """All rows of a batch for a kernel that samples those without truncation and leaves the others alone."""

    def __init__(self, engine_seed: int, rows: Sequence[SampleSpec], device: torch.device) -> None:
        table = torch.from_numpy(np.array([row.words for row in rows], np.int64).T.copy())
        table[0] = sample.combine_seeds(engine_seed, table[0])
        self._table = table.pin_memory().to(device, non_blocking=True)

    def force(self, logits: Tensor, positions: Tensor) -> Tensor:
        """As `RowSampler.force`."""
        from rlsys.rollout.sampling.kernel import sample_rows

        return sample_rows(logits, positions, self._table, forced=FORCED)
