"""Hooks inside SGLang's scheduler processes: our sampling, and access to the live parameters for weight transfers.

`run_scheduler` replaces SGLang's entry point of these processes (`Engine.run_scheduler_process_func`): it installs the
hooks and then runs SGLang's. Calls arrive over `rlsys.ipc.rpc` and run in their own threads; parameters are accessed
only while the engine is quarantined and idle.
"""

import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlsys.ipc.rpc import Method, RpcServer
from rlsys.rollout.engine_weights import EngineWeights
from rlsys.rollout.hf_files import hf_tensors
from rlsys.rollout.sglang.dp_attention import scheduler_place, serve_each_copy
from rlsys.rollout.sglang.sampler import SchedulerSampler, install
from rlsys.rollout.sglang.stages import connect_stages
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.utils.hosts import host_id
from rlsys.utils.polling import poll_until

IDLE_WAIT_S = 120.0


@dataclass(frozen=True)
class SchedulerSettings:
    """Settings of a scheduler process: its socket, the model, the sampling seed and the methods for weight transfers.

    `methods(engine)` are further methods that the worker may call; `serves`: the first rank of a copy of the attention,
    which logs its samples. `replica_arguments`: SGLang's, of a replica whose workers each start it as if alone.
    """

    socket: str
    path: str
    dtype: str
    seed: int
    serves: bool
    methods: "Callable[[SchedulerEngine], Mapping[str, Method]]"
    replica_arguments: Mapping[str, object] | None = None


class SchedulerEngine:
    """The parameters of one scheduler process, as much of a RolloutEngine as a weight transfer needs."""

    def __init__(self, settings: SchedulerSettings, scheduler: Any) -> None:
        self.model, self._scheduler = scheduler.tp_worker.model_runner.model, scheduler
        self.device = next(self.model.parameters()).device
        name_scales(self.model)
        self.weights = EngineWeights(*hf_tensors(settings.path, dtype=settings.dtype), lambda: self.model, self._derive)
        self.sampler = SchedulerSampler(settings.seed, self.device, logged=settings.serves)
        self.num_stops = self._num_seen_stops = self.num_releases = self._num_seen_releases = 0
        methods = {
            "take_samples": self.sampler.take,
            "load": self.load,
            "wait_idle": self.wait_idle,
            "wait_asleep": self.wait_asleep,
            "finish": self.weights.finish,
            **settings.methods(self),
        }
        self.server = RpcServer(Path(settings.socket), methods, on_thread_start=self._use_device)

    def weight_layout(self) -> WeightLayout:
        return self.weights.layout(rank=0, host=host_id())

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.weights.tensors()

    def begin_update(self) -> None:
        """Have the worker stop and quarantine the engine, and wait until this process is idle too."""
        self.server.call_back("begin_update")

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.weights.load([(name, tensor.to(self.device)) for name, tensor in bucket])

    def finish_update(self, version: int) -> None:
        """Switch to the new weights; the worker lifts the quarantine."""
        self.weights.finish()
        self.server.call_back("finish_update", version)

    def wait_idle(self) -> None:
        """Wait until no batch runs and none will follow, as the first rank pauses SGLang or has cleared the cache."""
        scheduler = self._scheduler

        def is_idle() -> bool:
            # while it is paused, batches (mbs) may still be on their way through the stages
            return not any(getattr(scheduler, "mbs", ())) if scheduler._engine_paused else scheduler.is_fully_idle()

        _wait_until(lambda: self.num_stops > self._num_seen_stops and is_idle(), "stop SGLang")
        self._num_seen_stops = self.num_stops
        if not scheduler._engine_paused:
            self.sampler.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait_asleep(self) -> None:
        """Wait until this process has released its memory, too: a later stage does so after the first rank has."""
        _wait_until(lambda: self.num_releases > self._num_seen_releases, "put SGLang to sleep")
        self._num_seen_stops, self._num_seen_releases = self.num_stops, self.num_releases

    def _derive(self) -> None:
        derive_again(self.model)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _use_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def run_scheduler(*args: object, settings: SchedulerSettings, **kwargs: object) -> None:
    """The entry point of a scheduler process; returns or exits when SGLang's does."""
    threading.Thread(target=_exit_with, args=(os.getppid(),), name="rlsys-parent", daemon=True).start()
    from sglang.srt.managers import scheduler as theirs

    engines: list[SchedulerEngine] = []
    install(lambda runner: engines[0].sampler if engines and runner.model is engines[0].model else None)
    _scale_scores(engines)
    given = signature(theirs.run_scheduler_process).bind(*args, **kwargs).arguments
    if settings.replica_arguments:
        serve_each_copy()
        given |= scheduler_place(settings.replica_arguments, given)
    _hook_scheduler(theirs.Scheduler, engines, settings)
    connect_stages(lambda: engines[0].sampler)
    theirs.run_scheduler_process(**given)


def name_scales(model: nn.Module) -> None:
    """Name scales of blocks as the loader of SGLang's Llama does, which looks for those of whole tensors."""
    from sglang.srt.models.llama import LlamaForCausalLM

    for layer in model.modules() if isinstance(model, LlamaForCausalLM) else ():
        if (scales := layer._parameters.pop("weight_scale_inv", None)) is not None:
            layer.weight_scale = layer.__dict__["weight_scale_inv"] = scales


@torch.no_grad()
def derive_again(model: nn.Module) -> None:
    """Have a model recompute what it derives from its parameters, and hold the scales of its cache again.

    In FP8 these are parameters, too: dropped with the others while the engine sleeps, and no push brings them.
    """
    for layer in model.modules():
        for name in ("k_scale", "v_scale"):
            if (scale := getattr(layer, f"{name}_float", None)) is not None:
                getattr(layer, name).fill_(scale)
    if (post_load := getattr(model, "post_load_weights", None)) is not None:
        post_load()


def _exit_with(parent: int) -> None:
    """Exit when the worker that started this process is gone."""
    poll_until(lambda: os.getppid() != parent, math.inf, every_s=0.5)
    os._exit(1)


def _hook_scheduler(scheduler_cls: Any, engines: list[SchedulerEngine], settings: SchedulerSettings) -> None:
    """Start the RpcServer before the event loop; on an error exit without SGLang's signal to the worker.

    The sampler learns which tokens SGLang drops: those of prompts read in part, and the last ones of requests that it
    retracts for lack of cache, which it draws again later.
    """
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Memory

    begin, run = scheduler_cls.__init__, scheduler_cls.run_event_loop
    run_one, retract = scheduler_cls.run_batch, Req.reset_for_retract

    def __init__(self: object, *args: object, **kwargs: object) -> None:
        _or_exit(lambda: begin(self, *args, **kwargs))

    def run_event_loop(self: Any) -> None:
        def loop() -> None:
            self.model_config.hf_eos_token_id = set()  # requests list all of their stop ids
            engines.append(SchedulerEngine(settings, self))
            run(self)

        _or_exit(loop)

    def run_batch(self: object, batch: ScheduleBatch, *args: object, **kwargs: object) -> object:
        for engine in engines:
            part = batch.chunked_req if batch.forward_mode.is_extend() else None
            engine.sampler.half_read = part.rid if part else ""
        return run_one(self, batch, *args, **kwargs)

    def reset_for_retract(self: Req) -> None:
        retract(self)
        for engine in engines:
            engine.sampler.retract(self.rid, len(self.output_ids))

    def counted(method: Callable[..., object], count: str = "num_stops") -> Callable[..., object]:
        def call(self: object, *args: object, **kwargs: object) -> object:
            done = method(self, *args, **kwargs)
            for engine in engines:
                setattr(engine, count, getattr(engine, count) + (done is not False))
            return done

        return call

    scheduler_cls.__init__, scheduler_cls.run_event_loop = __init__, run_event_loop
    scheduler_cls.run_batch, Req.reset_for_retract = run_batch, reset_for_retract
    scheduler_cls.flush_cache = counted(scheduler_cls.flush_cache)
    scheduler_cls.pause_generation = counted(scheduler_cls.pause_generation)
    Memory.release_memory_occupation = counted(Memory.release_memory_occupation, "num_releases")


def _wait_until(ready: Callable[[], bool], what: str) -> None:
    if not poll_until(ready, IDLE_WAIT_S, every_s=0.005):
        raise WeightTransferError(f"this replica's first rank did not {what} within {IDLE_WAIT_S:g} s")


def _or_exit(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _scale_scores(engines: list[SchedulerEngine]) -> None:
    """Make SGLang compute log-probabilities of given tokens at the requested temperature."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    original = LogitsProcessor._get_logits

    def _get_logits(self: Any, *args: object, **kwargs: object) -> Tensor:
        logits = original(self, *args, **kwargs)
        temperature = engines[0].sampler.temperature if engines else 1.0
        return logits if temperature == 1.0 else logits / temperature

    LogitsProcessor._get_logits = _get_logits
