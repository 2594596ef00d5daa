"""VLLMRollout: vLLM in this process behind the RolloutEngine protocol.

vLLM schedules, batches and runs the model; we sample the tokens inside its sampler (`rollout.sampling.hook`), so that
equal requests give equal tokens in any batch and log-probabilities need no sort of the vocabulary.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.models.hf import dtype_name, saved_config
from rlsys.models.vision import has_images
from rlsys.protocol import DataProto, ImageInputs, images_of
from rlsys.rollout.base import SLEEP_TAGS, BaseRolloutEngine, EngineContext, RunningRequest
from rlsys.rollout.batch import score_sequences
from rlsys.rollout.engine_weights import EngineWeights, HostWeights
from rlsys.rollout.hf_files import eos_ids_of, hf_tensors
from rlsys.rollout.sampling.hook import SPEC_KEY, UNUSED, SampleSpec
from rlsys.rollout.vllm.determinism import restored_torch
from rlsys.rollout.vllm.engine_args import engine_arguments
from rlsys.rollout.vllm.given_images import image_prompt, take_given_images
from rlsys.rollout.vllm.groups import end_groups, own_shared_memory, share_cache_plans
from rlsys.rollout.vllm.packed_weights import keep_loadable
from rlsys.types import WeightLayout
from rlsys.utils.environment import environment

NUM_DRAIN_STEPS = 2


class VLLMRollout(BaseRolloutEngine):
    """A RolloutEngine over vLLM's engine core in this process, one device.

    With `replica_size` above 1 that many consecutive ranks of the default process group serve one model: each has an
    engine like this one, and all get the same calls at the same time. Those of one copy of the attention return the
    same responses; of `data_parallel_size` copies each returns those of the requests that it has taken.

    On CPU vLLM packs the weights of its layers, so new weights are received into host tensors and loaded by its loader
    in `finish_update`. On a GPU they are written into its parameters in place, once `weights.adopt` has been given
    their learned layout. With `full_determinism` log-probabilities are as close to the trainer's as vLLM offers: see
    `rlsys.rollout.vllm.determinism`.
    """

    def __init__(self, path: str | Path, config: GenerationConfig, context: EngineContext) -> None:
        arguments = engine_arguments(path, config, context)
        length = arguments["max_model_len"]
        super().__init__(context, saved_config(path), max_model_len=length, eos_token_ids=eos_ids_of(path))
        self.config, self._salt = config, "0"
        on_cpu, has_stages = context.device == "cpu", config.pipeline_model_parallel_size > 1
        self._shares_groups = dist.is_initialized()
        self._place, self._group, names = 0, None, nullcontext()
        if config.replica_size > 1:
            self._place = dist.get_rank() % config.replica_size
            self._group, _ = dist.new_subgroups(config.replica_size, backend="gloo")
            names = own_shared_memory() if on_cpu else names
        if has_stages:
            share_cache_plans()
        # vLLM takes its data-parallel rank from RANK, which must count from the first rank of the replica
        with restored_torch(), names, environment({"RANK": str(self._place)}):
            self.engine = self._start(arguments)
        self._stream = None if on_cpu else torch.cuda.current_stream()
        self._sampling = self._rpc("rlsys_start_sampling")
        self._rpc("rlsys_share_gpu")
        needs_all = config.enable_rollout_routing_replay or has_images(self.hf_config)
        self._skips_running = arguments["disable_log_stats"] and not needs_all
        if has_stages and on_cpu:
            self.engine.engine_core.execute_dummy_batch()  # makes what a stage's input is copied into
        if config.quantization and context.load_format == "dummy":
            keep_loadable(self._model())
        self.weights = self._engine_weights(path, context)

    def _engine_weights(self, path: str | Path, context: EngineContext) -> HostWeights | EngineWeights:
        """Host tensors that vLLM reloads on CPU, and its own parameters on a GPU."""
        on_cpu, dtype = context.device == "cpu", dtype_name(self.config.dtype, context.device)
        expected = hf_tensors(path, dtype=dtype, has_values=on_cpu and context.load_format == "auto", has_memory=on_cpu)
        if on_cpu:
            return HostWeights(*expected, partial(self._rpc, "rlsys_reload"))
        return EngineWeights(*expected, self._model, partial(self._rpc, "rlsys_derive"))

    def _start(self, arguments: Mapping[str, Any]) -> Any:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(self.config.kv_cache_gib))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if arguments["disable_log_stats"] else "INFO")
        from vllm import EngineArgs, SamplingParams
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlsys.rollout.vllm.multi_step import start_multi_step

        if has_images(self.hf_config):
            arguments = take_given_images(self.hf_config, max_model_len=self.max_model_len) | {**arguments}
        extension = "rlsys.rollout.vllm.extension.RolloutExtension"
        settings = EngineArgs(skip_tokenizer_init=True, worker_extension_cls=extension, **arguments)
        # our sampler takes the place of vLLM's, of which it would compile everything
        with patch.object(SamplingParams, "for_sampler_warmup", SamplingParams, create=True):
            engine = LLMEngine.from_engine_args(settings)
        # ranks that serve together stop at the same step
        start_multi_step(engine, self.config.num_scheduler_steps, self._stopped if self._group is None else bool)
        return engine

    def _decode(self) -> bool:
        try:
            while True:
                new, cancelled, stop = self._next()
                for one in new:
                    given = one.request
                    self._add(given.input_ids, SampleSpec.of(one), given.images, max_tokens=one.max_new_tokens)
                if cancelled:
                    self._abort(cancelled)
                if stop:
                    self._stop()
                    return True
                if not (self._running or self._peers_run):
                    self._drain()
                    return False
                if self._report_due():
                    self._report()
                self._take(self._step())
        except BaseException:
            self._abort(list(self._running.values()))
            raise

    def _stop(self) -> None:
        """Deliver all that was sampled; running requests are kept with their cache, or given back."""
        if self.device != "cpu":
            torch.cuda.synchronize()  # a step may have been started ahead
        if self.config.on_update == "keep":
            return self._report(stops=True)
        running = list(self._running.values())
        self._end(running)
        self._abort(running)
        self._drain()

    def _abort(self, gone: Sequence[RunningRequest]) -> None:
        """Have vLLM forget these requests, and their samples."""
        self.engine.abort_request([str(one.number) for one in gone])
        self._take_samples([one.number for one in gone])

    def _take(self, outputs: Sequence[Any]) -> None:
        """Deliver the requests that vLLM has ended."""
        if ended := {int(output.request_id): output.outputs[0] for output in outputs if output.finished}:
            requests = {one.number: one for one in self._running.values() if one.number in ended}
            for number, one in requests.items():
                routes = getattr(ended[number], "routed_experts", None)
                one.routes = [] if routes is None else [routes]
            self._end(list(requests.values()), [ended[number].token_ids for number in requests])
            self._take_samples([number for number in ended if number not in requests])  # delivered before a stop

    def _take_samples(self, numbers: list[int], starts: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        return self._sampling.take(numbers, starts)

    def _drain(self) -> None:
        """Run the steps that were started ahead; their samples are for requests that have ended."""
        for _ in range(max(NUM_DRAIN_STEPS, self.config.pipeline_model_parallel_size)):
            self._take(self._step())

    def _step(self) -> Sequence[Any]:
        """A step of vLLM; in step with its data-parallel peers a rank without requests computes a dummy batch.

        Without statistics, routes and images vLLM's output processor gets only the requests that end, and the tokens
        of the others are kept for it: it would look at each of them at every step.
        """
        core = self.engine.engine_core
        if self._stream is not None:
            # At a thread's first all-reduce vLLM gives it a stream of its own, in the middle of its first step.
            torch.cuda.set_stream(self._stream)
        if self.config.data_parallel_size > 1 and not core.engine_core.scheduler.has_requests():
            core.execute_dummy_batch()
        if not self._skips_running:
            return self.engine.step()
        ended = []
        for output in core.get_output().outputs:
            state = self.engine.output_processor.request_states.get(output.request_id)
            if state is None or output.finish_reason is not None:
                ended.append(output)
            else:
                state.detokenizer.token_ids += output.new_token_ids
        return self.engine.output_processor.process_outputs(ended).request_outputs

    def _next(self) -> tuple[list[RunningRequest], list[RunningRequest], bool]:
        """What came in, and whether to stop at this step; ranks that serve together follow the first of them.

        Each request goes to the copy of the attention that has the fewest.
        """
        loads, copy = [0] * self.config.data_parallel_size, self._place // self.config.attention_size
        loads[copy] = len(self._running)
        decided = (self._stopped(), len(self._inbox)) if self._place == 0 else (0, 0)
        stop, num_events, *loads = self._largest(*decided, *loads)
        new, cancelled = self._pull(num_events)
        for one in new:
            least = loads.index(min(loads))
            loads[least] += 1
            if least != copy:
                with self._change:
                    del self._running[one.rid]
        self._peers_run = self._group is not None and any(loads)
        return [one for one in new if one.rid in self._running], cancelled, bool(stop)

    def _largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks that serve together."""
        if self._group is None:
            return list(values)
        largest = torch.tensor(values)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        return largest.tolist()

    def _add(
        self,
        ids: Sequence[int],
        spec: SampleSpec,
        images: Sequence[ImageInputs] = (),
        *,
        max_tokens: int = 1,
        prompt_logprobs: int | None = None,
    ) -> str:
        """Add a request to vLLM, which takes the tokens that we sample; returns its id there, the spec's number."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=list(spec.stop_ids),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=prompt_logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={SPEC_KEY: spec},
        )
        text = {"prompt_token_ids": list(ids), "cache_salt": self._salt}
        prompt = image_prompt(ids, self.hf_config, images, salt=self._salt) if images else text
        self.engine.add_request(str(spec.number), prompt, params)
        return str(spec.number)

    def _score(self, batch: DataProto, temperature: float) -> Tensor:
        self._rpc("rlsys_score_at", temperature)
        scores = score_sequences(batch, partial(self._prompt_logprobs, images_of(batch)))
        if self.config.pipeline_model_parallel_size > 1:
            dist.broadcast(scores, group=self._group, group_src=self.config.replica_size - 1)  # pyrefly: ignore
        return scores

    def _prompt_logprobs(
        self, images: Sequence[tuple[ImageInputs, ...]], sequences: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> Iterator[tuple[int, list[float]]]:
        rows = {
            self._add(ids, SampleSpec(next(self._numbers), len(ids), UNUSED), images[row], prompt_logprobs=0): row
            for row, ids in enumerate(sequences)
        }
        while any(self._largest(len(rows))):
            outputs = [output for output in self._step() if output.finished]
            self._take(outputs)
            for output in outputs:
                if output.request_id in rows:
                    row = rows.pop(output.request_id)
                    ids = sequences[row]
                    last = range(len(ids) - lengths[row], len(ids))
                    if len(output.prompt_logprobs) == len(ids):  # in the last stage
                        yield row, [output.prompt_logprobs[at][ids[at]].logprob for at in last]

    def weight_layout(self) -> WeightLayout:
        """On CPU every HF tensor whole, in host memory; on a GPU the learned layout of vLLM's own parameters."""
        return self.weights.layout(rank=self.rank, host=self.host)

    def local_tensors(self) -> Mapping[str, Tensor]:
        self.check_weights_awake()
        return self.weights.tensors()

    def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.weights.load(bucket)

    def finish_update(self, version: int) -> None:
        """Switch to the new weights; by its salt the cache that the old ones computed serves no new request.

        To reset that cache as well would take vLLM tens of milliseconds for the blocks of a large GPU.
        """
        self.weights.finish()
        self._salt = f"{version}/{next(self._numbers)}"
        if has_images(self.hf_config):
            self.engine.reset_encoder_cache()  # loading emptied the model's half of it
        super().finish_update(version)

    def _move_memory(self, tags: Sequence[str], *, asleep: bool) -> None:
        """vLLM sleeps as a whole, and resets its caches, but wakes by tag; buffers are kept on the host in any case."""
        if asleep and not self._asleep:
            self.engine.sleep(level=1 if self._offload_on_sleep else 2)
            self._salt = f"asleep/{next(self._numbers)}"  # no request takes what was cached before
            self._asleep |= set(SLEEP_TAGS)
        elif not asleep and (due := [tag for tag in SLEEP_TAGS if tag in tags and tag in self._asleep]):
            self.engine.wake_up(due)

    def _free(self) -> None:
        end_groups(self.engine.engine_core.shutdown, shared=self._shares_groups)
        del self.engine

    def _model(self) -> torch.nn.Module:
        return self.engine.model_executor.driver_worker.worker.model_runner.get_model()

    def _rpc(self, method: str, *args: object) -> Any:
        """The first worker's result of a method of `RolloutExtension`."""
        return self.engine.collective_rpc(method, args=args)[0]
