"""What every engine in this process shares: who may serve when, partial answers, quarantine, waiting requests."""

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
from typing import TYPE_CHECKING, Any

from rlsys.rollout.sampling.log import Answer
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams, WeightLayout
from rlsys.utils.errors import RolloutError, WeightTransferError

if TYPE_CHECKING:
    from torch import Tensor

    from rlsys.protocol import DataProto

SLEEP_TAGS = ("weights", "kv_cache")
STEP_WAIT_S = 120.0


@dataclass(frozen=True)
class Ticket:
    """A request, the number by which its answer is delivered, the ids that end it and the most tokens it may get."""

    number: int
    request: ModelRequest
    stop_ids: tuple[int, ...]
    max_new_tokens: int


Pull = Callable[[], Sequence[Ticket]]
Deliver = Callable[[int, ModelResponse], None]


def check_tags(tags: Sequence[str]) -> None:
    if unknown := sorted(set(tags) - set(SLEEP_TAGS)):
        raise ValueError(f"unknown sleep tags {unknown}: there are {list(SLEEP_TAGS)}")


def check_sampling(request: ModelRequest) -> None:
    params = request.gconfig
    if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
        raise ValueError(f"request {request.rid}: impossible sampling parameters {params}")


class ServingEngine(ABC):
    """The life cycle of a RolloutEngine; `generate` may be called from one thread, `pause` from any other.

    A backend decodes (`_decode`), scores, holds tensors, sleeps and frees itself. `vocab_size`, `max_model_len` (prompt
    and completion together) and `eos_token_ids` are what requests are checked against; `quarantined` engines wait for
    their first weights. Without `keep_asleep` weights that sleep on a GPU are given up, and the engine that wakes is
    quarantined until the next push.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        device: str,
        quarantined: bool = False,
        keep_asleep: bool = True,
        version: int = 0,
        rank: int = 0,
        host: str = "",
    ) -> None:
        self.vocab_size, self.max_model_len, self.eos_token_ids = vocab_size, max_model_len, tuple(eos_token_ids)
        self.device, self.version, self.rank, self.host = device, version, rank, host or socket.gethostname()
        self._quarantined, self._closed = quarantined, False
        self._keep_asleep = keep_asleep
        self._paused, self._updating = threading.Event(), threading.Event()
        self._busy = threading.Lock()
        self._asleep: set[str] = set()
        self._sleep_noops = self._num_tokens = self._num_requests = 0
        self._inbox: deque[tuple[ModelRequest, Future[ModelResponse]]] = deque()
        self._sampler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")

    @abstractmethod
    def _decode(self, pull: Pull, deliver: Deliver) -> int:
        """Complete what `pull` hands out until it has no more, or abort it all once `_stopped`; returns the tokens."""

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
        """Complete the requests; answers in their order.

        Greedy requests get log-probabilities at temperature 1. A request that `pause` or an update cut off, and every
        request while paused, returns with Finish.ABORT and the tokens it has. Raises WeightTransferError while
        quarantined, RolloutError on logits that are not finite, ValueError on a request that cannot be served.
        """
        tickets = [self._ticket(number, request) for number, request in enumerate(requests)]
        answers: dict[int, ModelResponse] = {}
        batches = iter([tickets])
        with self._serving():
            self._num_tokens += self._decode(lambda: next(batches, ()), answers.__setitem__)
        return [answers[number] for number in range(len(tickets))]

    async def sample(self, token_ids: Sequence[int], params: SamplingParams, session: str = "") -> ModelResponse:
        """Complete one prompt; calls that wait at the same time are decoded together."""
        request = ModelRequest(tuple(token_ids), params, session=session)
        self._ticket(0, request)
        answer: Future[ModelResponse] = Future()
        self._inbox.append((request, answer))
        self._sampler.submit(self._serve_inbox)
        return await asyncio.wrap_future(answer)

    def compute_log_prob(self, batch: DataProto, *, temperature: float = 1.0) -> Tensor:
        with self._serving():
            return self._score(batch, temperature)

    def pause(self) -> None:
        """Abort what runs at the next token, and everything that is asked until `resume`."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def begin_update(self) -> None:
        """Abort what runs at the next token, serve nothing until `finish_update`; after a failure, call it again."""
        self._updating.set()
        self._quarantined = True
        try:
            if not self._busy.acquire(timeout=STEP_WAIT_S):
                raise WeightTransferError(
                    f"the rollout engine did not stop within {STEP_WAIT_S:g} s: it hangs in a step"
                )
            self._busy.release()
        finally:
            self._updating.clear()

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Take full HF tensors; a tied name and the name it is held under are the same tensor."""
        if not self._quarantined:
            raise WeightTransferError("load outside an update: call begin_update first")
        self._load(bucket)

    def finish_update(self, version: int) -> None:
        self.version = version
        self._quarantined = False

    def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Give device memory back: weights to the host or given up, the cache dropped. On CPU a counted no-op."""
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
        """Abort what runs and free the model."""
        self._closed = True
        self._paused.set()
        self._sampler.shutdown(wait=True)
        with self._busy:
            self._free()

    def _stopped(self) -> bool:
        return self._paused.is_set() or self._updating.is_set()

    def _awake_weights(self) -> None:
        if "weights" in self._asleep:
            raise WeightTransferError("the rollout engine's weights are asleep: wake(['weights']) first")

    def _switch(self, tags: Sequence[str], *, asleep: bool) -> None:
        check_tags(tags)
        if self.device == "cpu":
            self._sleep_noops += 1
            return
        with self._busy:
            lost = not self._keep_asleep and not asleep and "weights" in self._asleep & set(tags)
            self._move_memory(tags, asleep=asleep)
            self._quarantined = self._quarantined or lost
            self._asleep = self._asleep | set(tags) if asleep else self._asleep - set(tags)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        with self._busy:
            if self._closed:
                raise RolloutError("the rollout engine is closed")
            if self._quarantined:
                raise WeightTransferError(
                    "the rollout engine is quarantined: its weights are not whole until the next push succeeds"
                )
            if self._asleep:
                raise RolloutError(f"the rollout engine sleeps ({', '.join(sorted(self._asleep))}): wake it first")
            yield

    def _serve_inbox(self) -> None:
        """Decode all that waits in the inbox and what arrives meanwhile; an error goes to everybody who waits."""
        waiting: dict[int, Future[ModelResponse]] = {}

        def pull() -> list[Ticket]:
            tickets = []
            while self._inbox:
                request, answer = self._inbox.popleft()
                if answer.set_running_or_notify_cancel():
                    ticket = self._ticket(self._num_requests, request)
                    waiting[ticket.number] = answer
                    tickets.append(ticket)
            return tickets

        def deliver(number: int, response: ModelResponse) -> None:
            waiting.pop(number).set_result(response)

        try:
            if self._inbox:
                with self._serving():
                    self._num_tokens += self._decode(pull, deliver)
        except Exception as error:
            pull()
            for answer in waiting.values():
                answer.set_exception(error)

    def _answered(self, request: ModelRequest, drawn: Answer, why: Finish) -> ModelResponse:
        """What an engine that takes our draws answers; RolloutError where its logits were not finite."""
        if not drawn.finite:
            raise RolloutError(f"logits are not finite for request {request.rid}: check the weights that were loaded")
        tokens = drawn.tokens
        versions = (self.version,) * len(tokens)
        full, sampled = drawn.full_logprobs, drawn.sampled_logprobs
        return ModelResponse(request.rid, request.input_ids, tokens, full, sampled, versions, why)

    def _ticket(self, number: int, request: ModelRequest) -> Ticket:
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
        return Ticket(number, request, tuple(dict.fromkeys(stops)), min(params.max_new_tokens, room))
