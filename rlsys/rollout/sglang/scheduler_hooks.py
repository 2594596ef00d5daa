"""What runs inside SGLang's scheduler processes: our draws, and the live parameters for whoever transfers weights.

`run_scheduler` stands in for SGLang's own entry point of these processes (`Engine.run_scheduler_process_func`): it
hooks in and then runs SGLang's. Calls come over `rlsys.ipc.rpc` and run in their own threads; parameters are touched
only while the engine is quarantined and idle.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.ipc.rpc import Method, RpcServer
from rlsys.rollout.engine_weights import LiveWeights
from rlsys.rollout.hf_files import hf_tensors
from rlsys.rollout.sglang.sampler import Draws, install
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError

QUIET_WAIT_S = 120.0


@dataclass(frozen=True)
class Inside:
    """What a scheduler process is told: its socket, the model, the seed of draws, and who serves weight transfers.

    `methods(inside)` are the further methods that the worker may call. `leads` is true on the first rank of a replica.
    """

    socket: str
    path: str
    dtype: str
    seed: int
    leads: bool
    methods: Callable[[InsideEngine], Mapping[str, Method]]


class InsideEngine:
    """The parameters of one scheduler process, as much of a RolloutEngine as a weight transfer needs."""

    def __init__(self, settings: Inside, scheduler: Any) -> None:
        runner = scheduler.tp_worker.model_runner
        self.model, self._scheduler = runner.model, scheduler
        self.device = next(self.model.parameters()).device
        self.weights = LiveWeights(
            *hf_tensors(settings.path, dtype=settings.dtype, filled=False, real=False), lambda: self.model
        )
        self.draws = Draws(settings.seed, self.device, logged=settings.leads)
        self.temperature = 1.0
        self.flushes = self._seen = 0
        methods = {
            "take_draws": self.draws.take,
            "score_at": self._score_at,
            "load": self.load,
            "wait_quiet": self.wait_quiet,
            "finish": self._finish,
        }
        self.server = RpcServer(
            Path(settings.socket), methods | dict(settings.methods(self)), on_thread_start=self._use_device
        )

    def weight_layout(self) -> WeightLayout:
        return self.weights.layout(rank=0, host=socket.gethostname())

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.weights.tensors()

    def begin_update(self) -> None:
        """Let the worker stop and quarantine the engine, and wait until nothing runs here either."""
        self.server.call_back("begin_update")

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.weights.load([(name, tensor.to(self.device)) for name, tensor in bucket])

    def finish_update(self, version: int) -> None:
        """Take the weights into use; the worker lifts the quarantine."""
        self._finish()
        self.server.call_back("finish_update", version)

    def wait_quiet(self) -> None:
        """Until this process runs no batch, and the first rank has said by clearing the cache that none will come."""
        end_s = time.monotonic() + QUIET_WAIT_S
        while self.flushes == self._seen or not self._scheduler.is_fully_idle():
            if time.monotonic() > end_s:
                raise WeightTransferError(
                    f"the first rank of this replica did not stop SGLang within {QUIET_WAIT_S:g} s"
                )
            time.sleep(0.005)
        self._seen = self.flushes
        self.draws.forget()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _finish(self) -> None:
        """Have the model derive again what it derives from its parameters."""
        derive = getattr(self.model, "post_load_weights", None)
        if derive is not None:
            with torch.no_grad():
                derive()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _score_at(self, temperature: float) -> None:
        self.temperature = temperature

    def _use_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def run_scheduler(*args: Any, inside: Inside, **kwargs: Any) -> None:
    """The entry point of a scheduler process; returns or ends the process when SGLang's does."""
    threading.Thread(target=_die_with, args=(os.getppid(),), name="rlsys-parent", daemon=True).start()
    from sglang.srt.managers import scheduler as theirs

    held: list[InsideEngine] = []
    install(lambda runner: held[0].draws if held and runner.model is held[0].model else None)
    _scale_scores(held)
    _hook_scheduler(theirs.Scheduler, held, inside)
    theirs.run_scheduler_process(*args, **kwargs)


def _die_with(parent: int) -> None:
    """End this process when the worker that started it is gone, whatever else is running."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _hook_scheduler(kind: Any, held: list[InsideEngine], inside: Inside) -> None:
    """Start the RpcServer before the event loop; an error ends this process alone, not the worker by a signal."""
    begin, run, flush = kind.__init__, kind.run_event_loop, kind.flush_cache

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _or_die(lambda: begin(self, *args, **kwargs))

    def run_event_loop(self: Any) -> None:
        def loop() -> None:
            self.model_config.hf_eos_token_id = set()  # requests name all tokens that end them
            held.append(InsideEngine(inside, self))
            run(self)

        _or_die(loop)

    def flush_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = flush(self, *args, **kwargs)
        if held:
            held[0].flushes += bool(done)
        return done

    kind.__init__, kind.run_event_loop, kind.flush_cache = __init__, run_event_loop, flush_cache


def _or_die(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _scale_scores(held: list[InsideEngine]) -> None:
    """Let SGLang take log-probabilities of given tokens at the temperature that was asked for."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    original = LogitsProcessor._get_logits

    def _get_logits(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        logits = original(self, *args, **kwargs)
        temperature = held[0].temperature if held else 1.0
        return logits if temperature == 1.0 else logits / temperature

    LogitsProcessor._get_logits = _get_logits
