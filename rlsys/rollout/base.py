"""The base of in-process rollout engines: when they may serve, aborted answers, quarantine, queued requests."""

from __future__ import annotations

import asyncio
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.rollout.sampling.log import SampledSequence
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams, WeightLayout
from rlsys.utils.errors import RolloutError, WeightTransferError

if TYPE_CHECKING:
    from torch import Tensor

    from rlsys.protocol import DataProto

SLEEP_TAGS = ("weights", "kv_cache")
STEP_WAIT_S = 120.0


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

    def dtype_name(self, configured: str) -> str:
        """The configured type; for "auto" bfloat16 on CUDA and float32 on CPU."""
        if configured != "auto":
            return configured
        return "bfloat16" if self.device.startswith("cuda") else "float32"


DEFAULT_CONTEXT = EngineContext()


@dataclass(frozen=True)
class QueuedRequest:
    """A request, the number that its answer is delivered under, the ids that end it and its token limit."""

    number: int
    request: ModelRequest
    stop_ids: tuple[int, ...]
    max_new_tokens: int


PullFn = Callable[[], Sequence[QueuedRequest]]
DeliverFn = Callable[[int, ModelResponse], None]


def check_tags(tags: Sequence[str]) -> None:
    """ValueError for tags other than those of SLEEP_TAGS."""
    if unknown := sorted(set(tags) - set(SLEEP_TAGS)):
        raise ValueError(f"unknown sleep tags {unknown}; choose from {list(SLEEP_TAGS)}")


def check_sampling(request: ModelRequest) -> None:
    """ValueError for sampling parameters out of range."""
    params = request.gconfig
    if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
        raise ValueError(f"request {request.rid}: invalid sampling parameters {params}")


class BaseRolloutEngine(ABC):
    """The life cycle of a RolloutEngine; `generate` may be called from one thread, `pause` from any other.

    A subclass decodes (`_decode`), scores, exposes tensors, moves memory and frees itself. Requests are checked against
    `vocab_size`, `max_model_len` (prompt and completion together) and `eos_token_ids`.
    """

    def __init__(
        self, context: EngineContext, *, vocab_size: int, max_model_len: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, tuple(eos_token_ids)
        self.device, self.version, self.rank = context.device, 0, context.rank
        self.host = context.host or socket.gethostname()
        self._quarantined, self._closed = context.load_format == "dummy", False
        self._offload_on_sleep = context.offload_on_sleep
        self._paused, self._updating = threading.Event(), threading.Event()
        self._busy = threading.Lock()
        self._asleep: set[str] = set()
        self._sleep_noops = self._num_tokens = self._num_requests = 0
        self._inbox: deque[tuple[ModelRequest, Future[ModelResponse]]] = deque()
        self._inbox_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")

    @abstractmethod
    def _decode(self, pull: PullFn, deliver: DeliverFn) -> int:
        """Complete what `pull` returns until it is empty, or abort all of it once `_stopped`; returns the tokens."""

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

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Complete the requests; returns their responses in order.

        Greedy requests get log-probabilities at temperature 1. A request that `pause` or an update cuts off, and every
        request while paused, returns with Finish.ABORT and its tokens so far. Raises WeightTransferError while
        quarantined, RolloutError on logits that are not finite, ValueError on a request that cannot be served.
        """
        queue = [self._queued(number, request) for number, request in enumerate(requests)]
        responses: dict[int, ModelResponse] = {}
        batches = iter([queue])
        with self._serving():
            self._num_tokens += self._decode(lambda: next(batches, ()), responses.__setitem__)
        return [responses[number] for number in range(len(queue))]

    async def sample(self, token_ids: Sequence[int], params: SamplingParams, session: str = "") -> ModelResponse:
        """Complete one prompt; concurrent calls are decoded together."""
        request = ModelRequest(tuple(token_ids), params, session=session)
        self._queued(0, request)
        response: Future[ModelResponse] = Future()
        self._inbox.append((request, response))
        self._inbox_thread.submit(self._serve_inbox)
        return await asyncio.wrap_future(response)

    def compute_log_prob(self, batch: DataProto, *, temperature: float = 1.0) -> Tensor:
        with self._serving():
            return self._score(batch, temperature)

    def pause(self) -> None:
        """Abort running requests at the next token, and all new ones until `resume`."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def begin_update(self) -> None:
        """Abort running requests at the next token and serve none until `finish_update`.

        After a failed update call it again.
        """
        self._updating.set()
        self._quarantined = True
        try:
            if not self._busy.acquire(timeout=STEP_WAIT_S):
                raise WeightTransferError(
                    f"the rollout engine did not stop within {STEP_WAIT_S:g} s; it may hang in a step"
                )
            self._busy.release()
        finally:
            self._updating.clear()

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load full HF tensors; a tied name and the name it is stored under are the same tensor."""
        if not self._quarantined:
            raise WeightTransferError("load was called outside an update; call begin_update first")
        self._load(bucket)

    def finish_update(self, version: int) -> None:
        self.version = version
        self._quarantined = False

    def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Free device memory: weights move to the host or are dropped, the cache is dropped. On CPU a counted no-op."""
        self._switch(tags, asleep=True)

    def wake(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        self._switch(tags, asleep=False)

    def health(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "quarantined": self._quarantined,
            "paused": self._paused.is_set(),
            "asleep": sorted(self._asleep),
            "sleep_noops": self._sleep_noops,
            "running": self._busy.locked(),
            "num_requests": self._num_requests,
            "num_tokens": self._num_tokens,
            "device": self.device,
        }

    def close(self) -> None:
        """Abort running requests and free the model."""
        self._closed = True
        self._paused.set()
        self._inbox_thread.shutdown(wait=True)
        with self._busy:
            self._free()

    def _stopped(self) -> bool:
        return self._paused.is_set() or self._updating.is_set()

    def check_weights_awake(self) -> None:
        """WeightTransferError while the weights are asleep."""
        if "weights" in self._asleep:
            raise WeightTransferError("the rollout engine's weights are asleep; call wake(['weights']) first")

    def _switch(self, tags: Sequence[str], *, asleep: bool) -> None:
        check_tags(tags)
        if self.device == "cpu":
            self._sleep_noops += 1
            return
        with self._busy:
            dropped = not self._offload_on_sleep and not asleep and "weights" in self._asleep & set(tags)
            self._move_memory(tags, asleep=asleep)
            self._quarantined = self._quarantined or dropped
            self._asleep = self._asleep | set(tags) if asleep else self._asleep - set(tags)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        with self._busy:
            if self._closed:
                raise RolloutError("the rollout engine is closed")
            if self._quarantined:
                raise WeightTransferError(
                    "the rollout engine is quarantined: its weights are incomplete until the next push succeeds"
                )
            if self._asleep:
                raise RolloutError(f"the rollout engine is asleep ({', '.join(sorted(self._asleep))}); call wake first")
            yield

    def _serve_inbox(self) -> None:
        """Decode the inbox and what arrives meanwhile; an error is raised in every waiting call."""
        waiting: dict[int, Future[ModelResponse]] = {}

        def pull() -> list[QueuedRequest]:
            queue = []
            while self._inbox:
                request, response = self._inbox.popleft()
                if response.set_running_or_notify_cancel():
                    queued = self._queued(self._num_requests, request)
                    waiting[queued.number] = response
                    queue.append(queued)
            return queue

        def deliver(number: int, response: ModelResponse) -> None:
            waiting.pop(number).set_result(response)

        try:
            if self._inbox:
                with self._serving():
                    self._num_tokens += self._decode(pull, deliver)
        except Exception as error:
            pull()
            for response in waiting.values():
                response.set_exception(error)

    def _response(self, request: ModelRequest, sampled: SampledSequence, finish: Finish) -> ModelResponse:
        """The response from logged samples; RolloutError if a token's logits were not finite."""
        if not sampled.finite:
            raise RolloutError(f"logits are not finite for request {request.rid}: check the weights that were loaded")
        versions = (self.version,) * len(sampled.tokens)
        full, truncated = sampled.full_logprobs, sampled.sampled_logprobs
        return ModelResponse(request.rid, request.input_ids, sampled.tokens, full, truncated, versions, finish)

    def _queued(self, number: int, request: ModelRequest) -> QueuedRequest:
        params, ids = request.gconfig, request.input_ids
        room = self.max_model_len - len(ids)
        if not ids or room < 1:
            raise ValueError(
                f"request {request.rid}: {len(ids)} prompt tokens, allowed are 1 to {self.max_model_len - 1}"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"request {request.rid}: a token id is outside the vocabulary of {self.vocab_size}")
        check_sampling(request)
        self._num_requests += 1
        stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self.eos_token_ids
        return QueuedRequest(number, request, tuple(dict.fromkeys(stops)), min(params.max_new_tokens, room))


def empty_response(request: ModelRequest) -> ModelResponse:
    """The response to an aborted request that has no tokens."""
    return ModelResponse(request.rid, request.input_ids, (), (), (), (), Finish.ABORT)
