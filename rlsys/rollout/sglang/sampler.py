"""Our sampling inside SGLang's scheduler process: tokens and both log-probabilities, the same on every rank.

A request's SampleSpec is encoded in its id (`request_id`), which SGLang carries to every rank and into every batch.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlsys.rollout.sampling.hook import RowSampler, SampleSpec
from rlsys.rollout.sampling.log import SampleLog

SEPARATOR = "|"


def request_id(spec: SampleSpec) -> str:
    """An id that starts with the spec's number, at a fixed width because SGLang aborts by prefix."""
    return f"{spec.number:012d}{SEPARATOR}{msgspec.json.encode(spec).decode()}"


@lru_cache(maxsize=1 << 16)
def spec_of(rid: str) -> SampleSpec | None:
    """The spec in a request id; None for requests that are not ours."""
    number, separator, text = rid.partition(SEPARATOR)
    return msgspec.json.decode(text, type=SampleSpec) if separator and number.isdigit() else None


class SchedulerSampler:
    """Samples the batches of one scheduler process; only the first rank of a replica keeps a log.

    `samples`: those of the last batch, None if it was not ours. `temperature`: that of the log-probabilities which the
    running batch asks for. `half_read`: the id of the request of which that batch reads a part; SGLang drops its token.
    """

    def __init__(self, seed: int, device: torch.device, *, logged: bool) -> None:
        self.rows = RowSampler(seed, device, logged=logged)
        self.samples: Tensor | None = None
        self.temperature, self.half_read = 1.0, ""
        self._rids: Sequence[str] = ()
        self._recent = deque[tuple[Sequence[str], Tensor]](maxlen=4)  # SGLang starts one step ahead of its outputs
        self._repeats = dict[str, dict[int, Tensor]]()
        self._lock = threading.RLock()

    def force(self, logits: Tensor, rids: Sequence[str], last_positions: Tensor) -> None:
        """Change the logits (N, V) so that greedy decoding takes our samples after `last_positions` (N,)."""
        with self._lock:
            if rids != self._rids:
                rows = [spec for rid in rids if (spec := spec_of(rid)) is not None]
                if len(rows) < len(rids):
                    return
                self.rows.set_rows(rows)
                self._rids = rids
            positions = last_positions + 1
            if self.half_read and self.half_read in rids:
                positions[rids.index(self.half_read)] = -1
            self.samples = self.rows.force(logits, positions)
            for rid in self._repeats.keys() & rids:
                row, drawn = rids.index(rid), self._repeats[rid]
                if (again := drawn.pop(int(self.samples[row, 0]), None)) is not None:
                    self.samples[row] = again
                    logits[row, int(again[1])] = torch.inf  # above the forced one
                    self.add([rid], self.samples[row : row + 1])
                if not drawn:
                    del self._repeats[rid]
            self._recent.append((rids, self.samples))

    def add(self, rids: Sequence[str], samples: Tensor) -> None:
        """Log the samples (N, 5) of `RowSampler.force` that the last pipeline stage made for these requests."""
        with self._lock:
            if self.rows.logged:
                self.rows.log.add([int(rid.partition(SEPARATOR)[0]) for rid in rids], samples)

    def take(self, numbers: Sequence[int], starts: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """As `SampleLog.take`: numbers of tokens (K,), and the tokens (T, 4): token, full, sampled, finite."""
        with self._lock:
            return self.rows.log.take(numbers, starts)

    def retract(self, rid: str, length: int) -> None:
        """Draw the tokens of a request from an index on again as they were: SGLang drops them, but they may be known.

        Every rank does, since SGLang takes the least of their tokens. Waits for steps on their way.
        """
        if self.rows.device.type == "cuda":
            torch.cuda.synchronize()
        with self._lock:
            recent = [samples[rids.index(rid)].cpu() for rids, samples in self._recent if rid in rids]
            self._repeats[rid] = {at: sample for sample in recent if (at := int(sample[0])) >= length}

    def clear(self) -> None:
        """Drop samples that were made after their request had ended."""
        with self._lock:
            self.rows.log, self._rids, self._repeats = SampleLog(), (), {}


def install(sampler_of: Callable[[Any], SchedulerSampler | None]) -> None:
    """Make SGLang's model runners take the tokens of `sampler_of(runner)`, or their own if that is None.

    The ranks of a last pipeline stage each send a part of the samples, so they take those of the first of them.
    """
    from sglang.srt.distributed.parallel_state import get_pp_group, get_tp_group
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    original, run = ModelRunner.sample, ModelRunner.forward

    def forward(self: ModelRunner, forward_batch: ForwardBatch, *args: object, **kwargs: object) -> object:
        if (sampler := sampler_of(self)) is not None:
            spec = spec_of(forward_batch.rids[0]) if forward_batch.return_logprob and forward_batch.rids else None
            sampler.temperature, sampler.samples = spec.params.temperature if spec else 1.0, None
        return run(self, forward_batch, *args, **kwargs)

    def sample(self: object, logits_output: Any, forward_batch: Any) -> object:
        if (sampler := sampler_of(self)) is not None and forward_batch.rids:
            last = forward_batch.positions if forward_batch.forward_mode.is_decode() else forward_batch.seq_lens - 1
            logits = logits_output.next_token_logits
            sampler.force(logits, forward_batch.rids, last[: logits.shape[0]])
            if sampler.samples is not None and get_pp_group().world_size > 1:
                get_tp_group().broadcast(sampler.samples)
        return original(self, logits_output, forward_batch)

    ModelRunner.sample, ModelRunner.forward = sample, forward
