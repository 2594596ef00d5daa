"""The base of in-process rollout engines: requests in and samples out, when they may serve, quarantine."""

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.models.vision import image_places
from rlsys.protocol import DataProto
from rlsys.rollout.partial import complete
from rlsys.rollout.sampling.log import by_request
from rlsys.types import Finish, ModelRequest, ModelResponse, ResponseDelta, SamplingParams, WeightLayout
from rlsys.utils.errors import RolloutError, WeightTransferError
from rlsys.utils.hosts import host_id

SLEEP_TAGS = ("weights", "kv_cache")
STEP_WAIT_S = 45.0
"""How long a step of the engine may take before a rank that waits for it fails."""
REPORT_S = 0.25
"""Running requests are reported at most this often."""

DEFAULT_CONFIG = GenerationConfig()
LoadFormat = Literal["auto", "dummy"]
"""Load the checkpoint's weights, or start with random ones and wait for the first push."""


@dataclass(frozen=True)
class EngineContext:
    """What an engine is given beside its config: the worker that it runs in, and how its weights are kept.

    With `load_format` "dummy" the engine is quarantined until the first weights are pushed. Without `offload_on_sleep`
    weights that sleep on a GPU are dropped, and the engine that wakes is quarantined until the next push.
    """

    device: str = "cpu"
    load_format: LoadFormat = "auto"
    offload_on_sleep: bool = True
    rank: int = 0
    host: str = ""


DEFAULT_CONTEXT = EngineContext()


@dataclass(eq=False)
class RunningRequest:
    """A request that an engine has, under a number of its own: the ids that end it, its token limit, how far it is."""

    number: int
    request: ModelRequest
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    delivered: list[int] = field(default_factory=list)
    """The tokens that exchanges have been given."""
    is_cancelled: bool = False
    routes: list[np.ndarray] = field(default_factory=list)
    """Arrays (tokens, layers, experts of a token) of the experts that its tokens took, one after another."""

    @property
    def rid(self) -> str:
        return self.request.rid


def check_tags(tags: Sequence[str]) -> None:
    """ValueError for tags other than those of SLEEP_TAGS."""
    if unknown := sorted(set(tags) - set(SLEEP_TAGS)):
        raise ValueError(f"unknown sleep tags {unknown}; choose from {list(SLEEP_TAGS)}")


def check_sampling(params: SamplingParams) -> None:
    """ValueError for sampling parameters out of range."""
    if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
        raise ValueError(f"invalid sampling parameters {params}")


def until_end(sampled: np.ndarray, running: RunningRequest) -> tuple[np.ndarray, Finish | None]:
    """The part of `sampled` (T, 4), which follows the delivered tokens, up to the end of the request; and how it ends.

    None if the request has not ended. An engine that starts steps ahead may have sampled beyond the end.
    """
    num_delivered = len(running.delivered)
    min_left, room = running.request.gconfig.min_new_tokens - num_delivered, running.max_new_tokens - num_delivered
    for at, token in enumerate(sampled[:room, 0].tolist()):
        if at >= min_left and token in running.stop_ids:
            return sampled[: at + 1], Finish.STOP
    return sampled[:room], Finish.LENGTH if len(sampled) >= room else None


class BaseRolloutEngine(ABC):
    """The life cycle of a RolloutEngine, which decodes on a thread of its own while requests are open.

    A subclass decodes (`_decode`), logs what it samples, scores, exposes tensors, moves memory and frees itself.
    Requests are checked against the model's configuration, `max_model_len` (prompt and completion together) and
    `eos_token_ids`.

    `exchange` puts requests into the inbox. The thread runs `_decode`, which pulls them from there, reports what it has
    sampled (`_report`) where an exchange waits for it, and ends requests (`_end`); both fill the outbox, which the next
    exchange returns. Whatever must not run beside decoding (new weights, sleep, scoring) parks the thread first.
    """

    config: GenerationConfig

    def __init__(
        self, context: EngineContext, hf_config: Any, *, max_model_len: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.hf_config, self.vocab_size = hf_config, hf_config.get_text_config().vocab_size
        self.max_model_len, self.eos_token_ids = max_model_len, tuple(eos_token_ids)
        self.device, self.rank, self.host = context.device, context.rank, context.host or host_id()

        self.version = 0
        self._quarantined = context.load_format == "dummy"
        self._offload_on_sleep = context.offload_on_sleep
        self._asleep: set[str] = set()
        self._parked = self._closed = False  # parked: the thread has stopped, and must not decode
        self._sleep_noops = self._num_tokens = self._num_requests = self._num_halts = 0

        self._change = threading.Condition()
        self._numbers = itertools.count()
        self._inbox: list[RunningRequest | str] = []
        """Requests that came in, and rids of requests that are not wanted any more."""
        self._running: dict[str, RunningRequest] = {}
        self._outbox: list[ResponseDelta] = []
        self._report_at_s, self._reported_s = 0.0, float("-inf")
        """When the waiting exchange wants a report, 0 if none does; when the last one was."""

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        self._is_serving = self._peers_run = False
        """Whether the thread decodes; whether ranks that decode in step with this one have requests."""

    @abstractmethod
    def _decode(self) -> bool:
        """Decode what `_pull` returns and `_end` it; False when nothing runs, True when it ended because of `_stopped`.

        Where `_stopped` all tokens sampled so far are delivered, where `_report_due` all but the last of each request.
        """

    @abstractmethod
    def _take_samples(self, numbers: list[int], starts: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """As `SampleLog.take`, of these requests."""

    @abstractmethod
    def _score(self, batch: DataProto, temperature: float) -> Tensor: ...
    @abstractmethod
    def _move_memory(self, tags: Sequence[str], *, asleep: bool) -> None: ...
    @abstractmethod
    def _free(self) -> None: ...
    @abstractmethod
    def weight_layout(self) -> WeightLayout: ...
    @abstractmethod
    def local_tensors(self) -> Mapping[str, Tensor]: ...
    @abstractmethod
    def _load(self, bucket: Sequence[tuple[str, Tensor]]) -> None: ...

    # ---- requests ----------------------------------------------------------------------------------------------

    def exchange(
        self, new: Sequence[ModelRequest] = (), *, wait_s: float, cancel: Collection[str] = ()
    ) -> list[ResponseDelta]:
        """Hand in requests, cancel others, and take what was sampled since the last exchange (see RolloutEngine).

        Requests that run on are reported every REPORT_S seconds at most, those that ended in the next exchange.
        Greedy requests get log-probabilities at temperature 1. A request that cannot be served is answered as refused.
        Raises WeightTransferError while quarantined and RolloutError while asleep or closed; nothing is taken then.
        """
        self._check_serving()
        with self._change:
            self._outbox = [delta for delta in self._outbox if delta.rid not in cancel]
            self._inbox += cancel
            for rid in self._running.keys() & cancel:
                self._running[rid].is_cancelled = True
            for request in new:
                try:
                    self._inbox.append(self._queued(request))
                except ValueError as error:
                    self._outbox.append(ResponseDelta(request.rid, error=str(error), refused=True))
            self._report_at_s = max(time.monotonic() + wait_s / 2, self._reported_s + REPORT_S)
            self._continue()
            self._change.wait_for(lambda: not self._report_at_s or not self._is_open, timeout=wait_s)
            deltas, self._outbox = self._outbox, []
            return deltas

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Complete the requests, for callers that have the engine to themselves (see `complete`)."""
        return complete(self, requests)

    @property
    def _is_open(self) -> bool:
        return bool(self._inbox or self._running)

    def _continue(self) -> None:
        """Have the thread decode, if it does not already."""
        with self._change:
            if (self._is_open or self._peers_run) and not self._is_serving:
                self._is_serving = True
                self._thread.submit(self._serve)

    def _serve(self) -> None:
        while True:
            with self._change:
                if not (self._is_open or self._peers_run) or self._parked:
                    self._is_serving = False
                    return self._change.notify_all()
            try:
                self._parked = self._decode()
            except Exception as error:  # reported with every request that it ended
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._change:
            rids = [*self._running, *(event.rid for event in self._inbox if isinstance(event, RunningRequest))]
            self._running, self._inbox = {}, []
            self._outbox += [ResponseDelta(rid, error=f"{type(error).__name__}: {error}") for rid in rids]

    def _pull(self, num: int | None = None) -> tuple[list[RunningRequest], list[RunningRequest]]:
        """The requests that came in, which run from now on, and running ones that were cancelled.

        With `num` only the first `num` entries of the inbox, which are waited for.
        """
        with self._change:
            if num and not self._change.wait_for(lambda: len(self._inbox) >= num, timeout=STEP_WAIT_S):
                raise RolloutError(f"a request did not reach this rank within {STEP_WAIT_S:g} s")
            events = self._inbox[:num]
            del self._inbox[:num]
            new, cancelled = dict[str, RunningRequest](), []
            for event in events:
                if isinstance(event, RunningRequest):
                    new[event.rid] = event
                elif new.pop(event, None) is None and event in self._running:
                    cancelled.append(self._running.pop(event))
            self._running |= new
            return list(new.values()), cancelled

    def _put_back(self, waiting: Sequence[RunningRequest]) -> None:
        """Return requests that have no tokens yet, to be pulled again."""
        with self._change:
            self._inbox[:0] = waiting
            for queued in waiting:
                self._running.pop(queued.rid, None)

    def _report_due(self) -> bool:
        """Whether an exchange waits for what was sampled so far."""
        return 0 < self._report_at_s <= time.monotonic()

    def _deliver(self, deltas: Sequence[ResponseDelta], *, reports: bool = False) -> None:
        """Have the next exchange return these, without those of cancelled requests; with `reports` it returns now."""
        with self._change:
            wanted = {request.rid for request in self._running.values() if not request.is_cancelled}
            deltas = [delta for delta in deltas if delta.rid in wanted]
            for delta in deltas:
                self._num_tokens += len(delta.tokens)
                if delta.finish is not None or delta.error:
                    self._running.pop(delta.rid, None)
            self._outbox += deltas
            if reports:
                self._report_at_s, self._reported_s = 0.0, time.monotonic()
                self._change.notify_all()

    def _report(self, *, stops: bool = False) -> None:
        """Deliver what was sampled since the last report.

        Unless the engine `stops` now, the last token of each is kept back: one that is ahead of its own outputs may
        drop it and draw again, and the end of a request is left to `_end`, which is called when it has noticed it.
        """
        running, deltas = list(self._running.values()), []
        starts = [len(request.delivered) for request in running]
        samples = self._take_samples([request.number for request in running], starts)
        for request, new in zip(running, by_request(*samples), strict=True):
            drawn, end = until_end(new, request)
            sampled, end = (drawn, end) if stops else (drawn[:-1], None)
            if len(sampled):
                deltas.append(delta := self._delta(request, sampled, end))
                request.delivered += delta.tokens
        self._deliver(deltas, reports=True)
        for request in running:
            request.is_cancelled |= request.rid not in self._running

    def _end(self, ended: Sequence[RunningRequest], tokens: Sequence[Sequence[int]] | None = None) -> None:
        """Deliver the rest of requests that have ended, or that the engine gives back because it stops.

        `tokens` are all that the engine itself returned for each of them; they must be the ones that were sampled.
        RolloutError where they are not, or where a request has not ended.
        """
        samples, deltas = by_request(*self._take_samples([request.number for request in ended])), []
        for at, (request, whole) in enumerate(zip(ended, samples, strict=True)):
            returned = whole[:, 0].tolist() if tokens is None else list(tokens[at])
            sampled, end = until_end(whole[len(request.delivered) : len(returned)], request)
            if request.is_cancelled:
                continue
            if tokens is not None and [*request.delivered, *sampled[:, 0]][: len(returned)] != returned:
                raise RolloutError(f"the engine returned other tokens than were sampled for request {request.rid}")
            if end is None and not self._stopped():
                raise RolloutError(f"the engine ended request {request.rid} early, after {len(returned)} tokens")
            if end is not None and self.config.enable_rollout_routing_replay and not request.routes:
                raise RolloutError("this version of the engine returns no routes of experts: set router_replay.mode=R2")
            deltas.append(self._delta(request, sampled, end or Finish.ABORT))
        self._deliver(deltas)

    def _delta(self, request: RunningRequest, sampled: np.ndarray, finish: Finish | None) -> ResponseDelta:
        """The delta of what was sampled (T, 4) with the present weights; RolloutError if logits were not finite."""
        ids, full, drawn, finite = sampled.T.tolist()
        if not all(finite):
            raise RolloutError(f"logits are not finite for request {request.rid}: check the weights that were loaded")
        tokens, versions = tuple(map(int, ids)), (self.version,) * len(sampled)
        routes = np.concatenate(request.routes) if request.routes and finish in (Finish.STOP, Finish.LENGTH) else None
        return ResponseDelta(request.rid, tokens, tuple(full), tuple(drawn), versions, finish, routes)

    def _queued(self, request: ModelRequest) -> RunningRequest:
        """The request as it is put into the inbox; ValueError if it cannot be served."""
        params, ids = request.gconfig, request.input_ids
        room = self.max_model_len - len(ids)
        if not ids or room < 1:
            raise ValueError(f"{len(ids)} prompt tokens, allowed are 1 to {self.max_model_len - 1}")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self.vocab_size}")
        if request.images:
            image_places(self.hf_config, torch.tensor(ids), request.images)
        check_sampling(params)
        self._num_requests += 1
        stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self.eos_token_ids
        limit = min(params.max_new_tokens, room)
        return RunningRequest(next(self._numbers), request, tuple(dict.fromkeys(stops)), limit)

    def compute_log_prob(self, batch: DataProto, *, temperature: float = 1.0) -> Tensor:
        self._check_serving()
        with self._halted():
            return self._score(batch, temperature)

    # ---- life --------------------------------------------------------------------------------------------------

    def _stopped(self) -> bool:
        """Whether to stop at this step."""
        return self._quarantined or self._closed or self._num_halts > 0

    @contextmanager
    def _halted(self) -> Iterator[None]:
        """Decoding stops before and continues after."""
        self._num_halts += 1
        try:
            self._park()
            yield
        finally:
            self._num_halts -= 1
            self._unpark()

    def _park(self) -> None:
        """Wait until the thread has stopped.

        The ranks of a replica stop at the same step, so the thread is started for it where requests are open, this
        rank's or its peers'.
        """
        with self._change:
            self._continue()
            if not self._change.wait_for(lambda: not self._is_serving, timeout=STEP_WAIT_S):
                raise WeightTransferError(f"the engine did not stop within {STEP_WAIT_S:g} s; it may hang in a step")

    def _unpark(self) -> None:
        self._parked = self._stopped()
        self._continue()

    def begin_update(self) -> None:
        """Stop at the next token and serve nothing until `finish_update`; after a failed update call it again."""
        self._quarantined = True
        self._park()

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load full HF tensors; a tied name and the name it is stored under are the same tensor."""
        if not self._quarantined:
            raise WeightTransferError("load was called outside an update; call begin_update first")
        self._load(bucket)

    def finish_update(self, version: int) -> None:
        self.version = version
        self._quarantined = False
        self._unpark()

    def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Free device memory: weights move to the host or are dropped, the cache is dropped. On CPU a counted no-op."""
        self._switch(tags, asleep=True)

    def wake(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        self._switch(tags, asleep=False)

    def health(self) -> dict[str, object]:
        running = len(self._running) + len(self._inbox)
        counts = {"running": running, "num_requests": self._num_requests, "num_tokens": self._num_tokens}
        sleep = {"asleep": sorted(self._asleep), "sleep_noops": self._sleep_noops}
        return {"version": self.version, "quarantined": self._quarantined, **sleep, **counts, "device": self.device}

    def close(self) -> None:
        """Give up running requests and free the model."""
        self._closed = True
        self._thread.shutdown(wait=True)
        self._free()

    def check_weights_awake(self) -> None:
        """WeightTransferError while the weights are asleep."""
        if "weights" in self._asleep:
            raise WeightTransferError("the rollout engine's weights are asleep; call wake(['weights']) first")

    def _switch(self, tags: Sequence[str], *, asleep: bool) -> None:
        check_tags(tags)
        if self.device == "cpu":
            self._sleep_noops += 1
            return
        if self._is_open:
            raise RolloutError(f"{len(self._running)} requests are running: cancel them before the engine sleeps")
        with self._halted():
            self._peers_run = False
            dropped = not self._offload_on_sleep and not asleep and "weights" in self._asleep & set(tags)
            self._move_memory(tags, asleep=asleep)
            self._quarantined = self._quarantined or dropped
            self._asleep = self._asleep | set(tags) if asleep else self._asleep - set(tags)

    def _check_serving(self) -> None:
        if self._closed:
            raise RolloutError("the rollout engine is closed")
        if self._quarantined:
            raise WeightTransferError("the engine is quarantined: its weights are incomplete until a push succeeds")
        if self._asleep:
            raise RolloutError(f"the rollout engine is asleep ({', '.join(sorted(self._asleep))}); call wake first")
