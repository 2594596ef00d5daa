"""SGLang's pipeline stages: the samples of the last one travel to the first, which answers, and all can be paused."""

from collections.abc import Callable
from typing import Any

from rlsys.rollout.sglang.sampler import SchedulerSampler

SAMPLES = "rlsys_samples"
"""The key of our samples among the tensors that the last stage sends to the first."""


def is_paused(scheduler: Any) -> bool:
    """Whether a scheduler is paused and none of its stage's batches is on its way through the stages."""
    return scheduler._engine_paused and not any(getattr(scheduler, "mbs", ()))


def connect_stages(scheduler_cls: Any, sampler_fn: Callable[[], SchedulerSampler | None]) -> None:
    """Send the samples of a batch with its tokens, and start no batch while paused.

    SGLang's loop over stages does not look at the flag that a pause sets. All stages take a request at the same step of
    that loop, a pause too, so that those that follow expect no batch either.
    """
    plan, prepare = scheduler_cls.get_next_batch_to_run, scheduler_cls._pp_prepare_tensor_dict
    receive, drained = scheduler_cls._pp_prep_batch_result, scheduler_cls._pp_microbatches_drained

    def get_next_batch_to_run(self: Any, *args: Any, **kwargs: Any) -> object:
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        if self._engine_paused:
            return NextBatchPlan(batch_to_run=None, running_batch=self.running_batch)
        return plan(self, *args, **kwargs)

    def _pp_prepare_tensor_dict(self: Any, *args: Any) -> dict[str, Any]:
        tensors, sampler = prepare(self, *args), sampler_fn()
        if sampler is not None and sampler.samples is not None:
            tensors[SAMPLES], sampler.samples = sampler.samples, None
        return tensors

    def _pp_prep_batch_result(self: Any, batch: Any, metadata: Any, outputs: Any) -> object:
        samples, sampler = outputs.tensors.get(SAMPLES), sampler_fn()
        if samples is not None and sampler is not None:
            sampler.add([request.rid for request in batch.reqs], samples)
        return receive(self, batch, metadata, outputs)

    def _pp_microbatches_drained(self: Any) -> bool:
        last = getattr(self, "last_mbs", ())  # in a pause, prompts that were read wait there to be decoded
        return drained(self) and all(batch is None or batch.is_empty() for batch in last)

    scheduler_cls.get_next_batch_to_run = get_next_batch_to_run
    scheduler_cls._pp_microbatches_drained = _pp_microbatches_drained
    scheduler_cls._pp_prepare_tensor_dict = _pp_prepare_tensor_dict
    scheduler_cls._pp_prep_batch_result = _pp_prep_batch_result
