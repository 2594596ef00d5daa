"""The logits processor through which vLLM takes our tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rlsys.rollout.sampling.hook import SPEC_KEY, RowSampler, SampleSpec


class SamplingProcessor(LogitsProcessor):
    """Samples a token for each row and makes it the one that greedy decoding takes.

    A request's SampleSpec is in `SamplingParams.extra_args["rlsys_sample"]`; the engine's seed is the model config's.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.sampler = RowSampler(vllm_config.model_config.seed, device)
        self._rows: dict[int, tuple[SampleSpec, list[int]]] = {}
        self._counted: list[tuple[int, list[int]]] = []
        self._kept: dict[int, list[int]] = {}
        """Of each request by number the tokens that vLLM has kept; it drops what is sampled within a prompt."""
        self._pin = is_pin_memory and device.type == "cuda"

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, output_ids in batch_update.added:
            spec = params.extra_args[SPEC_KEY]
            rows[index] = spec, output_ids
            self._kept[spec.number] = output_ids
        for source, target, direction in batch_update.moved:
            first, second = rows.pop(source, None), rows.pop(target, None)
            if first is not None:
                rows[target] = first
            if second is not None and direction is MoveDirectionality.SWAP:
                rows[source] = second
        ordered = [rows[index] for index in sorted(rows)]
        self._counted = [(spec.prompt_length, output_ids) for spec, output_ids in ordered]
        self.sampler.set_rows([spec for spec, _ in ordered])

    def take(self, numbers: Sequence[int], starts: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """As `SampleLog.take`, up to what vLLM has kept."""
        ends = [len(self._kept.get(number, ())) for number in numbers]
        if starts is None:
            for number in numbers:
                self._kept.pop(number, None)
        return self.sampler.log.take(numbers, starts, ends)

    def apply(self, logits: Tensor) -> Tensor:
        assert logits.shape[0] == len(self._rows), f"{logits.shape[0]} rows of logits for {len(self._rows)} requests"
        positions = torch.tensor([length + len(ids) for length, ids in self._counted], pin_memory=self._pin)
        self.sampler.force(logits, positions.to(logits.device, non_blocking=True))
        return logits
