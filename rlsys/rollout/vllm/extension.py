"""Methods added to vLLM's workers, called by name through collective_rpc."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group

from rlsys.rollout.vllm.packed_weights import derive_again, pack_again
from rlsys.rollout.vllm.sampler import RunnerSampling, SamplingProcessor


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

    def rlsys_start_sampling(self) -> SamplingProcessor | RunnerSampling:
        """Have vLLM take our tokens: runner 1 only counts those of each request and does not wait for their ids."""
        if not (batch := getattr(self.model_runner, "input_batch", None)):
            return RunnerSampling(self.model_runner)
        batch.logitsprocs_need_output_token_ids = False
        return next(one for one in batch.logitsprocs.all if isinstance(one, SamplingProcessor))

    def rlsys_reload(self, tensors: Mapping[str, Tensor]) -> None:
        """Load full HF tensors through vLLM's own loader, which packs them for its kernels."""
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        pack_again(self.model_runner.get_model())

    def rlsys_derive(self) -> None:
        """Derive again what attention layers keep beside weights that were written in place."""
        derive_again(self.model_runner.get_model(), self.model_runner.model_config.dtype)

    def rlsys_score_at(self, temperature: float) -> None:
        """Compute prompt log-probabilities at this temperature from now on; only the last stage has logits for them."""
        if worker := getattr(self.model_runner, "prompt_logprobs_worker", None):  # of runner 2
            compute = type(worker).compute_prompt_logprobs
            worker.compute_prompt_logprobs = lambda logits_of, *given: compute(
                worker, lambda hidden_states: logits_of(hidden_states).float() / temperature, *given
            )
        self.model_runner.sampler.compute_logprobs = lambda logits: (logits.float() / temperature).log_softmax(-1)
        if not get_pp_group().is_last_rank:
            self.model_runner._get_prompt_logprobs_dict = lambda *_: {}
