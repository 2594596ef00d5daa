"""SGLang's pipeline stages: the samples of the last one travel to the first, which answers, and all can be paused."""

from collections.abc import Callable

from rlsys.rollout.sglang.sampler import SchedulerSampler

SAMPLES = "rlsys_samples"
"""The key of our samples among the tensors that the last stage sends to the first."""


def connect_stages(sampler_fn: Callable[[], SchedulerSampler]) -> None:
    """Send the samples of a batch with its tokens, and start no batch while SGLang is paused.

    Its loop over stages does not look at the flag that a pause sets. All stages take a request at the same turn of that
    loop, a pause too, so none of them waits for a batch that an earlier one has not started.
    """
    from sglang.srt.managers.schedule_batch import NextBatchPlan, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    plan, prepare = Scheduler.get_next_batch_to_run, Scheduler._pp_prepare_tensor_dict
    receive, drained = Scheduler._pp_prep_batch_result, Scheduler._pp_microbatches_drained

    def get_next_batch_to_run(self: Scheduler, running_batch: ScheduleBatch, **others: object) -> NextBatchPlan:
        if self._engine_paused:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return plan(self, running_batch=running_batch, **others)

    def _pp_prepare_tensor_dict(self: Scheduler, *args: object) -> dict[str, object]:
        return {**prepare(self, *args), SAMPLES: sampler_fn().samples}

    def _pp_prep_batch_result(self: Scheduler, batch: ScheduleBatch, metadata: object, proxy: PPProxyTensors) -> object:
        if (samples := proxy[SAMPLES]) is not None:
            sampler_fn().add([request.rid for request in batch.reqs], samples)
        return receive(self, batch, metadata, proxy)

    def _pp_microbatches_drained(self: Scheduler) -> bool:
        # prompts that were read wait in last_mbs for the end of a pause
        return drained(self) and all(batch is None or batch.is_empty() for batch in getattr(self, "last_mbs", ()))

    Scheduler.get_next_batch_to_run = get_next_batch_to_run
    Scheduler._pp_prepare_tensor_dict = _pp_prepare_tensor_dict
    Scheduler._pp_prep_batch_result = _pp_prep_batch_result
    Scheduler._pp_microbatches_drained = _pp_microbatches_drained
