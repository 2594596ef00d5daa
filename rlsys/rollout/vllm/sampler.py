"""How vLLM takes our tokens: from a logits processor or, in its model runner 2, from a replacement of its sampler."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rlsys.rollout.sampling.hook import SPEC_KEY, RowSampler, SampleSpec

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class SamplingProcessor(LogitsProcessor):
    """Samples a token for each row and makes it the one that greedy decoding takes.

    A request's SampleSpec is in `SamplingParams.extra_args["rlsys_sample"]`; the engine's seed is the model config's.
    """

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
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


class RunnerSampling:
    """Samples a token for each row in place of the sampler of model runner 2, which takes no logits processors.

    It keeps its rows on the device, where runner 1 has Python iterate over all of them several times in each step.
    """

    def __init__(self, runner: "GPUModelRunner") -> None:
        self.sampler = RowSampler(runner.model_config.seed, runner.device)
        self.take, self._states = self.sampler.log.take, runner.req_states
        self._specs, self._rows = dict[int, SampleSpec](), np.zeros(0, np.int32)
        names = list(signature(runner.sampler.sample).parameters)[2:]
        self._places = names.index("idx_mapping_np"), names.index("pos")
        runner.sampler.apply_staged_writes = lambda: None  # of what vLLM's own sampling reads, copied in every step
        runner.sampler.sample, runner.sampler.add_request = self._sample, partial(self._add, runner.sampler.add_request)

    def _add(self, add_request: Callable[..., None], row: int, *given: object) -> None:
        add_request(row, *given)
        self._specs[row], self._rows = cast("SamplingParams", given[-1]).extra_args[SPEC_KEY], np.zeros(0, np.int32)

    def _sample(self, logits: Tensor, index: Tensor, *given: Any, **_: object) -> tuple[Tensor, Tensor]:
        row_at, position_at = self._places
        rows, positions = given[row_at], given[position_at] + 1
        if not np.array_equal(self._rows, rows):
            self._rows = rows
            self.sampler.set_rows([self._specs[row] for row in self._rows.tolist()])
        ends = self._states.prefill_len
        if np.any(self._states.num_computed_prefill_tokens[rows] < ends.np[rows]):
            positions.masked_fill_(positions < ends.gpu[index], -1)  # vLLM drops what is sampled within a prompt
        return self.sampler.force(logits, positions)[:, 1].long(), logits
