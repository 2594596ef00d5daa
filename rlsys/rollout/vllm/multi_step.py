"""Several decoding steps for each step of vLLM's scheduler, whose Python takes longer than a small model's step.

The scheduler reserves slots for several tokens of a request as it does for speculative decoding. Model runner 2, which
keeps sampled tokens on the device, makes a step for each of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def start_multi_step(engine: "LLMEngine", num_steps: int, is_awaited: Callable[[], bool]) -> None:
    """Have this engine make several decoding steps per schedule, fewer when it is awaited, and one where it cannot.

    It can where it starts steps ahead, with model runner 2, for models whose only state is the KV cache, and without
    statistics, speculative decoding, routes and KV connectors.
    """
    scheduler = cast("AsyncScheduler", cast("InprocClient", engine.engine_core).engine_core.scheduler)
    is_ahead = isinstance(scheduler, AsyncScheduler) and scheduler.use_v2_model_runner and not scheduler.log_stats
    connectors = scheduler.connector or getattr(scheduler, "aux_output_connector", None)
    if is_ahead and not (scheduler.num_spec_tokens or connectors or scheduler.has_mamba_layers):
        scheduler.num_spec_tokens = num_steps - 1
        MultiStepRunner(engine.model_executor.driver_worker.worker.model_runner, is_awaited)  # pyrefly: ignore


class MultiStepRunner:
    """Has a runner make the steps that the scheduler's output holds, and return their tokens together.

    Tokens of steps that it does not make are rejected ones to the scheduler.
    """

    def __init__(self, runner: "GPUModelRunner", is_awaited: Callable[[], bool]) -> None:
        self._execute: Callable[..., object] = runner.execute_model
        self._sample, self._is_awaited, self._later = runner.sample_tokens, is_awaited, list[SchedulerOutput]()
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens  # pyrefly: ignore

    def execute_model(self, scheduler_output: SchedulerOutput, *given: object, **named: object) -> object:
        first, *self._later = split_steps(scheduler_output)
        return self._execute(first, *given, **named)

    def sample_tokens(self, grammar_output: None) -> "StepOutputs":
        outputs = [self._sample(grammar_output)]
        for step in self._later:
            if self._is_awaited():
                break
            self._execute(step)
            outputs.append(self._sample(None))
        return StepOutputs(cast("list[AsyncModelRunnerOutput]", outputs))


class StepOutputs(AsyncModelRunnerOutput):
    """The outputs of several steps as one."""

    def __init__(self, steps: list[AsyncModelRunnerOutput]) -> None:
        self.steps = steps

    def get_output(self) -> ModelRunnerOutput:
        first, *later = [step.get_output() for step in self.steps]
        for step in later:
            for name, tokens in zip(step.req_ids, step.sampled_token_ids, strict=True):
                first.sampled_token_ids[first.req_id_to_index[name]] += tokens
        return first


def split_steps(scheduled: SchedulerOutput) -> Iterator[SchedulerOutput]:
    """What is scheduled without its placeholders of speculative tokens, then a step for each of those."""
    later, known = scheduled.scheduled_spec_decode_tokens, scheduled.scheduled_cached_reqs
    if not later:
        yield scheduled
        return
    counts = {name: count - len(later.get(name, ())) for name, count in scheduled.num_scheduled_tokens.items()}
    yield replace(_counted(scheduled, counts), scheduled_spec_decode_tokens={})
    computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    computed |= zip(known.req_ids, known.num_computed_tokens, strict=True)
    for step in range(max(map(len, later.values()))):
        names = [name for name in counts if len(later.get(name, ())) > step]
        requests = CachedRequestData.make_empty()
        requests.req_ids, requests.new_block_ids = names, [None] * len(names)
        requests.num_computed_tokens = [computed[name] + counts[name] + step for name in names]
        yield _counted(replace(SchedulerOutput.make_empty(), scheduled_cached_reqs=requests), dict.fromkeys(names, 1))


def _counted(scheduled: SchedulerOutput, counts: dict[str, int]) -> SchedulerOutput:
    return replace(scheduled, num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()))
