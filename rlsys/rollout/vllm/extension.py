"""Methods added to vLLM's workers, called by name through collective_rpc."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group

from rlsys.rollout.vllm.packed_weights import derive_again, pack_again
from rlsys.rollout.vllm.sampler import SamplingProcessor


class RolloutExtension:
    """Mixed into vLLM's worker class."""

    model_runner: Any
    sleep: Callable[[int], None]

    def rlsys_share_gpu(self) -> None:
        """Do not fail where, as vLLM released memory to sleep, another process took more of the GPU."""
        sleep = self.sleep

        def sleep_beside_others(level: int = 1) -> None:
            try:
                sleep(level)
            except AssertionError as error:
                if "Memory usage increased" not in str(error):
                    raise

        self.sleep = sleep_beside_others

    def rlsys_count_tokens(self) -> None:
        """Have vLLM only count the tokens of each request for our sampler, and not wait for their ids at every step."""
        self.model_runner.input_batch.logitsprocs_need_output_token_ids = False

    def rlsys_take_samples(
        self, numbers: Sequence[int], starts: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `SamplingProcessor.take`."""
        processors = self.model_runner.input_batch.logitsprocs.all
        processor = next(one for one in processors if isinstance(one, SamplingProcessor))
        return processor.take(numbers, starts)

    def rlsys_reload(self, tensors: Mapping[str, Tensor]) -> None:
        """Load full HF tensors through vLLM's own loader, which packs them for its kernels."""
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        pack_again(self.model_runner.get_model())

    def rlsys_derive(self) -> None:
        """Derive again what attention layers keep beside weights that were written in place."""
        derive_again(self.model_runner.get_model(), self.model_runner.model_config.dtype)

    def rlsys_score_at(self, temperature: float) -> None:
        """Compute prompt log-probabilities at this temperature from now on; only the last stage has logits for them."""
        self.model_runner.sampler.compute_logprobs = lambda logits: (logits.float() / temperature).log_softmax(-1)
        if not get_pp_group().is_last_rank:
            self.model_runner._get_prompt_logprobs_dict = lambda *_: {}
