"""Methods added to vLLM's workers, called by name through collective_rpc."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rlsys.rollout.vllm.sampler import SamplingProcessor


class RolloutExtension:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def rlsys_take_samples(
        self, numbers: Sequence[int], starts: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `SampleLog.take`."""
        processors = self.model_runner.input_batch.logitsprocs.all
        processor = next(one for one in processors if isinstance(one, SamplingProcessor))
        return processor.sampler.log.take(numbers, starts)

    def rlsys_reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load full HF tensors through vLLM's own loader, which packs them for its kernels."""
        self.model_runner.reload_weights(weights_iterator=iter(tensors))
        head: Any = getattr(self.model_runner.get_model(), "lm_head", None)
        if hasattr(head, "cpu_linear"):  # a tied head loads nothing, so its packed copy would stay stale
            head.quant_method.process_weights_after_loading(head)
        for layer in self.model_runner.get_model().modules():  # vLLM repacks experts only if they are loaded first
            experts: Any = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if experts is not None:
                experts.fused_experts.process_weights_after_loading(layer)

    def rlsys_score_at(self, temperature: float) -> None:
        """Compute prompt log-probabilities at this temperature from now on."""
        self.model_runner.sampler.compute_logprobs = lambda logits: (logits.float() / temperature).log_softmax(-1)
