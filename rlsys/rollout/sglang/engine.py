"""SGLangRollout: SGLang behind the RolloutEngine protocol, its scheduler in a child process.

SGLang schedules, batches and runs the model; we sample the tokens inside its scheduler process
(`rlsys.rollout.sglang.sampler`), so that equal requests give equal tokens in any batch and on any engine.
"""

import tempfile
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.ipc.rpc import Method, RpcClient
from rlsys.models.hf import dtype_name, saved_config
from rlsys.protocol import DataProto, ImageInputs, images_of
from rlsys.protocol.columns import tensors_of
from rlsys.rollout.base import SLEEP_TAGS, STEP_WAIT_S, BaseRolloutEngine, EngineContext, RunningRequest
from rlsys.rollout.batch import score_sequences
from rlsys.rollout.hf_files import eos_ids_of
from rlsys.rollout.sampling.hook import SampleSpec
from rlsys.rollout.sglang.arguments import SINGLE_RANK, ReplicaRank, server_arguments
from rlsys.rollout.sglang.given_images import request_images
from rlsys.rollout.sglang.launch import EngineThread
from rlsys.rollout.sglang.sampler import request_id
from rlsys.rollout.sglang.scheduler_hooks import SchedulerEngine, SchedulerSettings
from rlsys.rollout.versions import SGLANG
from rlsys.types import ModelRequest, ResponseDelta, SamplingParams, WeightLayout
from rlsys.utils.errors import ConfigError, RolloutError, WeightTransferError
from rlsys.utils.polling import poll_until

POLL_S = 0.02
"""How often new requests, finished ones and a pause are checked for."""
TAIL_S = 0.2
"""How long SGLang may take to finish a step whose answers are here; it is paused after that."""
CALL_WAIT_S = 300.0
START_WAIT_S = 900.0
Pending = Future[Mapping[str, Any]]


def no_methods(engine: SchedulerEngine) -> Mapping[str, Method]:
    """No methods beside the engine's own."""
    return {}


class SGLangRollout(BaseRolloutEngine):
    """A RolloutEngine over SGLang's Engine, one rank of a replica.

    Parameters are in the scheduler process: `methods` run there and are called through `remote.call`; `weight_layout`
    and `local_tensors` raise here. The first rank of each copy of the attention serves requests of its own; the others
    return none. The first rank of the replica pauses SGLang, clears its cache, moves its memory and scores.
    With `full_determinism` log-probabilities are as close to the trainer's as SGLang offers.
    """

    def __init__(
        self,
        path: str | Path,
        config: GenerationConfig,
        context: EngineContext,
        *,
        replica: ReplicaRank = SINGLE_RANK,
        methods: Callable[[SchedulerEngine], Mapping[str, Method]] = no_methods,
    ) -> None:
        hf_config, dtype = saved_config(path), dtype_name(config.dtype, context.device)
        text = hf_config.get_text_config()
        length = config.max_model_len or text.max_position_embeddings
        SGLANG.installed_features()
        arguments = server_arguments(path, config, context, max_model_len=length, replica=replica)
        context = replace(context, offload_on_sleep=arguments["enable_weights_cpu_backup"])
        super().__init__(context, hf_config, max_model_len=length, eos_token_ids=eos_ids_of(path))
        self.config, self._num_layers = config, text.num_hidden_layers
        self.is_leader = replica.rank == 0
        self._copy, place = divmod(replica.rank, config.attention_size)
        self.serves, self._is_paused = place == 0, False
        self._folder = tempfile.TemporaryDirectory(prefix="rlsys-sglang-")
        socket = Path(self._folder.name) / "scheduler"
        settings = SchedulerSettings(str(socket), str(path), dtype, config.seed, self.serves, methods)
        self._engine_thread = EngineThread(arguments, settings, socket=socket, deadline_s=START_WAIT_S)
        callbacks = {"begin_update": self.begin_update, "finish_update": super().finish_update}
        peer = f"SGLang's scheduler of rollout rank {context.rank}"
        self.remote = RpcClient(socket, peer, callbacks, error=RolloutError)
        self._pending: dict[Pending, RunningRequest] = {}
        self._check_cache_size()

    def exchange(
        self, new: Sequence[ModelRequest] = (), *, wait_s: float, cancel: Collection[str] = ()
    ) -> list[ResponseDelta]:
        """As `RolloutEngine.exchange`; copies of the attention take requests in turn, the first by its id."""
        if not self.serves:
            return []
        copies = self.config.data_parallel_size
        first = crc32(new[0].rid.encode()) if new else 0
        return super().exchange(new[(self._copy - first) % copies :: copies], wait_s=wait_s, cancel=cancel)

    def _continue(self) -> None:
        """Decode, with SGLang going on where an update has paused it: by now the other ranks have been updated too."""
        if not self._quarantined:
            self._resume()
        super()._continue()

    def _decode(self) -> bool:
        pending, stop_by_s = self._pending, 0.0
        try:
            while True:
                stop = self._stopped()
                new, cancelled = self._pull()
                if stop:
                    self._put_back(new)
                # copies of a prompt come last: SGLang reads them from its cache, but not within a batch
                number = defaultdict[Sequence[int], Iterator[int]](count)
                for one in () if stop else sorted(new, key=lambda one: next(number[one.request.input_ids])):
                    spec, given = SampleSpec.of(one), one.request
                    pending[self._submit(given.input_ids, spec, given.images, max_tokens=one.max_new_tokens)] = one
                for one in cancelled:
                    self._abort(request_id(SampleSpec.of(one)))
                if not pending:
                    return stop
                if stop and self.config.on_update == "keep" and not self._num_halts:
                    return True
                if stop:
                    stop_by_s = stop_by_s or time.monotonic() + STEP_WAIT_S
                    self._abort_all(stop_by_s)
                done, _ = wait(pending, timeout=POLL_S, return_when=ALL_COMPLETED)
                self.remote.check_alive()
                if done:
                    answers, ended = [future.result() for future in done], [pending.pop(future) for future in done]
                    for one, answer in zip(ended, answers, strict=True):
                        one.routes = self._routes(answer, len(one.request.input_ids))
                    self._end(ended, [answer["output_ids"] for answer in answers])
                if self._report_due():
                    self._report()
        except BaseException:
            self._abort_all(time.monotonic() + STEP_WAIT_S)
            pending.clear()
            raise

    def _submit(
        self,
        ids: Sequence[int],
        spec: SampleSpec,
        images: Sequence[ImageInputs] = (),
        *,
        max_tokens: int = 1,
        score_from: int = -1,
    ) -> Pending:
        """Submit a request to SGLang, which takes the tokens that we sample; log-probabilities from `score_from` on.

        Only requests of one weight version share the cache of their prompts.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        params: dict[str, object] = {"temperature": 0.0, "max_new_tokens": max_tokens}
        params |= {"stop_token_ids": list(spec.stop_ids)} if spec.stop_ids else {"ignore_eos": True}
        more: dict[str, object] = {"return_logprob": True, "logprob_start_len": score_from} if score_from >= 0 else {}
        if self.config.enable_rollout_routing_replay and score_from < 0:
            more["return_routed_experts"] = True
        if images:
            more["image_data"] = [request_images(ids, self.hf_config, images, salt=str(self.version))]
        request = GenerateReqInput(
            input_ids=list(ids), sampling_params=params, rid=request_id(spec), extra_key=str(self.version), **more
        )

        async def answer() -> Mapping[str, Any]:
            return await anext(self._engine_thread.engine.tokenizer_manager.generate_request(request, None))

        return self._engine_thread.submit(answer())

    def _routes(self, answer: Mapping[str, Any], prompt_length: int) -> list[np.ndarray]:
        """The experts of every token but the last, if SGLang returned them."""
        encoded = answer["meta_info"].get("routed_experts")
        if encoded is None:
            return []
        num_tokens = prompt_length + len(answer["output_ids"]) - 1
        return [np.frombuffer(b64decode(encoded), np.int32).reshape(num_tokens, self._num_layers, -1)]

    def _abort_all(self, stop_by_s: float) -> None:
        """Repeated at every poll, since a request may still be on its way to the scheduler."""
        if time.monotonic() > stop_by_s:
            raise RolloutError(f"SGLang did not abort its requests within {STEP_WAIT_S:g} s; it may hang in a step")
        self._abort("")

    def _abort(self, engine_id: str) -> None:
        """Abort a request, or all with an empty id."""
        abort = self._engine_thread.engine.tokenizer_manager.abort_request
        self._engine_thread.loop.call_soon_threadsafe(partial(abort, rid=engine_id, abort_all=not engine_id))

    def _take_samples(self, numbers: list[int], starts: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        return self.remote.call("take_samples", numbers, starts, deadline_s=CALL_WAIT_S)

    def _score(self, batch: DataProto, temperature: float) -> Tensor:
        if not self.is_leader:
            return torch.zeros(tensors_of(batch.batch)["responses"].shape)
        images, params = images_of(batch), SamplingParams(1, temperature=temperature)

        def logprobs(sequences: Sequence[Sequence[int]], lengths: Sequence[int]) -> Iterator[tuple[int, list[float]]]:
            starts = [len(ids) - length - 1 for ids, length in zip(sequences, lengths, strict=True)]
            pending = [
                self._submit(ids, SampleSpec(next(self._numbers), len(ids), params), own, score_from=start)
                for ids, start, own in zip(sequences, starts, images, strict=True)
            ]
            for row, (future, length) in enumerate(zip(pending, lengths, strict=True)):
                entries = self._result(future)["meta_info"]["input_token_logprobs"]
                yield row, [entry[0] for entry in entries[len(entries) - length :]]

        return score_sequences(batch, logprobs)

    def _result(self, future: Pending) -> Mapping[str, Any]:
        """Wait for an answer while the scheduler is alive."""
        while True:
            if wait([future], timeout=1.0).done:
                return future.result()
            self.remote.check_alive()

    def begin_update(self) -> None:
        """Stop SGLang and wait until no rank computes.

        Running requests are kept in place with their cache, or aborted and the cache of the old weights cleared.
        """
        self.check_weights_awake()
        super().begin_update()
        wait_s = TAIL_S if self.config.on_update == "keep" else STEP_WAIT_S
        if self.is_leader and (self._pending or not self._flush(wait_s)):
            self._is_paused, pause = True, self._engine_thread.engine.tokenizer_manager.pause_generation
            self._control(pause, "PauseGenerationReqInput", mode="in_place")
        self.remote.call("wait_idle", deadline_s=CALL_WAIT_S)
        self._report(stops=True)

    def _flush(self, wait_s: float) -> bool:
        """Clear the cache; False if some rank still has requests after `wait_s`."""
        thread, flush = self._engine_thread, self._engine_thread.engine.tokenizer_manager.flush_cache
        return poll_until(lambda: thread.wait(flush(), "flush_cache", STEP_WAIT_S).success, wait_s, every_s=POLL_S)

    def _unpark(self) -> None:
        """The next exchange continues, when the other ranks of the replica have been updated too."""
        self._parked = self._stopped()

    def finish_update(self, version: int) -> None:
        self.remote.call("finish", deadline_s=CALL_WAIT_S)
        super().finish_update(version)

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            resume = self._engine_thread.engine.tokenizer_manager.continue_generation
            self._control(resume, "ContinueGenerationReqInput", torch_empty_cache=False)

    def _control(self, method: Callable[[Any], Coroutine[Any, Any, object]], request: str, **fields: object) -> None:
        """Send a request of SGLang's own to its scheduler."""
        from sglang.srt.managers import io_struct

        self._engine_thread.wait(method(getattr(io_struct, request)(**fields)), request, CALL_WAIT_S)

    def weight_layout(self) -> WeightLayout:
        raise WeightTransferError("SGLang's parameters are in its scheduler process; call weight_layout there")

    def local_tensors(self) -> Mapping[str, Tensor]:
        raise WeightTransferError("SGLang's parameters are in its scheduler process and cannot be accessed here")

    def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.check_weights_awake()
        self.remote.call("load", list(bucket), deadline_s=CALL_WAIT_S)

    def _move_memory(self, tags: Sequence[str], *, asleep: bool) -> None:
        due = [tag for tag in SLEEP_TAGS if tag in tags and (tag in self._asleep) != asleep]
        if not due:
            return
        manager = self._engine_thread.engine.tokenizer_manager
        if self.is_leader and asleep and not self._asleep and not self._flush(STEP_WAIT_S):
            raise RolloutError(f"SGLang did not become idle on every rank within {STEP_WAIT_S:g} s; it cannot sleep")
        if self.is_leader and asleep:
            self._control(manager.release_memory_occupation, "ReleaseMemoryOccupationReqInput", tags=due)
        elif self.is_leader:
            self._control(manager.resume_memory_occupation, "ResumeMemoryOccupationReqInput", tags=due)
        if asleep:
            self.remote.call("wait_asleep", deadline_s=CALL_WAIT_S)

    def _free(self) -> None:
        self.remote.close()
        self._engine_thread.stop()
        self._folder.cleanup()

    def _check_cache_size(self) -> None:
        """ConfigError if the cache is too small for the longest request, whose answer SGLang would truncate."""
        infos = self._engine_thread.engine._scheduler_init_result.scheduler_infos
        num_tokens = infos[0].get("max_total_num_tokens") if infos else None
        if num_tokens is not None and num_tokens < self.max_model_len:
            self.close()
            why = f"SGLang's cache holds {num_tokens} tokens, but the longest request has {self.max_model_len}"
            key = "actor_rollout_ref.rollout.gpu_memory_utilization (on CPU kv_cache_gib)"
            raise ConfigError(f"{why}; raise {key} or set max_model_len")
