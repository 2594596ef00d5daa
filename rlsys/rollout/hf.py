"""HFRollout: a transformers causal language model behind the RolloutEngine protocol, on CPU or CUDA."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.models.stacked import Part, flat_stack, saved_parts
from rlsys.rollout.decode import Decoder, Deliver, Limits, Pull
from rlsys.rollout.kv import ATTENTION
from rlsys.rollout.rows import Ticket
from rlsys.rollout.score import score_responses
from rlsys.types import Box, ModelRequest, ModelResponse, SamplingParams, Shard, WeightLayout
from rlsys.utils.errors import RolloutError, WeightTransferError

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

LoadFormat = Literal["auto", "dummy"]
SLEEP_TAGS = ("weights", "kv_cache")
STEP_WAIT_S = 120.0


def load_causal_lm(path: str | Path, *, load_format: LoadFormat, dtype: str, device: str) -> Any:
    """A causal language model from an HF directory, or with random weights of its config.json for "dummy".

    Reads safetensors only and runs no code from the directory.
    """
    kind = getattr(torch, dtype)
    if load_format == "dummy":
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=False).to(device)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=kind, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).to(device)


class HFRollout:
    """A RolloutEngine over a transformers model; `generate` may be called from one thread, `pause` from any other.

    With `load_format="dummy"` the engine is quarantined until the first weights are pushed. `max_model_len` bounds
    prompt and completion together; by default it is what the model's positions allow.
    """

    def __init__(
        self,
        model: Any,
        *,
        load_format: LoadFormat = "auto",
        seed: int = 0,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        version: int = 0,
        rank: int = 0,
        host: str = "",
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.limits = Limits(max_num_seqs, max_num_batched_tokens)
        self.seed, self.rank, self.host = seed, rank, host or socket.gethostname()
        text = model.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.max_model_len: int = max_model_len or getattr(text, "max_position_embeddings", 0) or 1 << 30
        self.eos_token_ids = _eos_of(model) if eos_token_ids is None else tuple(eos_token_ids)
        _use_grouped_attention(model, self.max_model_len)
        self.version = version
        self._home: torch.device = model.device
        self._quarantined = load_format == "dummy"
        self._closed = False
        self._paused, self._updating = threading.Event(), threading.Event()
        self._busy = threading.Lock()
        self._asleep: set[str] = set()
        self._sleep_noops = self._num_tokens = self._num_requests = 0
        self._inbox: deque[tuple[ModelRequest, Future[ModelResponse]]] = deque()
        self._sampler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-rollout")

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        load_format: LoadFormat = "auto",
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        version: int = 0,
        rank: int = 0,
        host: str = "",
    ) -> HFRollout:
        """The engine over the model in an HF directory; `dtype` is torch's name."""
        return cls(
            load_causal_lm(path, load_format=load_format, dtype=dtype, device=device),
            load_format=load_format,
            seed=seed,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            version=version,
            rank=rank,
            host=host,
        )

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Complete the requests; answers in their order.

        Greedy requests get log-probabilities at temperature 1. A request that `pause` or an update cut off, and every
        request while paused, returns with Finish.ABORT and the tokens it has. Raises WeightTransferError while
        quarantined, RolloutError on logits that are not finite, ValueError on a request that cannot be served.
        """
        tickets = [self._ticket(number, request) for number, request in enumerate(requests)]
        answers: dict[int, ModelResponse] = {}
        batches = iter([tickets])
        self._decode(lambda: next(batches, ()), answers.__setitem__)
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
            return score_responses(
                self.model, batch, temperature=temperature, max_tokens=self.limits.max_num_batched_tokens
            )

    def pause(self) -> None:
        """Abort what runs at the next token, and everything that is asked until `resume`."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def weight_layout(self) -> WeightLayout:
        """Every tensor whole, under the name it is saved by; tied names are aliases."""
        tensors = self.local_tensors()
        parts = {name: (part.stack, part.start, part.shape) for name, part in self._parts.items()}
        stacks = {stack for stack, _, _ in parts.values()}
        parts |= {name: (name, 0, tuple(t.shape)) for name, t in tensors.items() if name not in stacks}
        return WeightLayout(
            rank=self.rank,
            host=self.host,
            shards=tuple(
                Shard(Box(name, (0,) * len(shape), shape), local, (start, *(0,) * len(shape))[: len(shape)])
                for name, (local, start, shape) in parts.items()
            ),
            full_shapes={name: shape for name, (_, _, shape) in parts.items()},
            dtypes={n: str(tensors[local].dtype).removeprefix("torch.") for n, (local, _, _) in parts.items()},
            aliases=self._aliases(),
        )

    @cached_property
    def _parts(self) -> dict[str, Part]:
        return saved_parts(self.model)

    def local_tensors(self) -> Mapping[str, Tensor]:
        """The live parameters and persistent buffers by name, each once, stacked experts as one matrix; ask again
        after `wake`."""
        if "weights" in self._asleep:
            raise WeightTransferError("the rollout engine's weights are asleep: wake(['weights']) first")
        aliases = self._aliases()
        state = self.model.state_dict(keep_vars=True)
        stacks = {part.stack for part in self._parts.values()}
        return {n: flat_stack(t.detach()) if n in stacks else t.detach() for n, t in state.items() if n not in aliases}

    def _aliases(self) -> dict[str, str]:
        first: dict[int, str] = {}
        state = self.model.state_dict(keep_vars=True)
        return {name: held for name, t in state.items() if (held := first.setdefault(id(t), name)) != name}

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

    @torch.no_grad()
    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Copy full HF tensors into the parameters; a tied name and the name it is held under are the same tensor."""
        if not self._quarantined:
            raise WeightTransferError("load outside an update: call begin_update first")
        held, aliases = self.local_tensors(), self._aliases()
        for name, tensor in bucket:
            part = self._parts.get(name)
            target = held.get(aliases.get(name, name) if part is None else part.stack)
            if part is not None and target is not None:
                target = target[part.start : part.start + part.shape[0]]
            if target is None:
                raise WeightTransferError(f"the rollout model has no tensor '{name}'")
            if target.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} for {tuple(target.shape)}"
                raise WeightTransferError(f"tensor '{name}' has the wrong shape: {shapes}")
            target.copy_(tensor)

    def finish_update(self, version: int) -> None:
        self.version = version
        self._quarantined = False

    def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Give device memory back: weights to the host, the cache dropped. On CPU a counted no-op."""
        self._switch(tags, asleep=True)

    def wake(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        self._switch(tags, asleep=False)

    def _switch(self, tags: Sequence[str], *, asleep: bool) -> None:
        if unknown := sorted(set(tags) - set(SLEEP_TAGS)):
            raise ValueError(f"unknown sleep tags {unknown}: there are {list(SLEEP_TAGS)}")
        if self._home.type == "cpu":
            self._sleep_noops += 1
            return
        with self._busy:
            if "weights" in tags:
                self.model.to("cpu" if asleep else self._home)
            self._asleep = self._asleep | set(tags) if asleep else self._asleep - set(tags)
            torch.cuda.empty_cache()

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
            "device": str(self._home),
        }

    def close(self) -> None:
        """Abort what runs and free the model."""
        self._closed = True
        self._paused.set()
        self._sampler.shutdown(wait=True)
        with self._busy:
            self.model = None

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

    def _decode(self, pull: Pull, deliver: Deliver) -> None:
        with self._serving():
            decoder = Decoder(
                self.model,
                limits=self.limits,
                seed=self.seed,
                version=self.version,
                stopped=lambda: self._paused.is_set() or self._updating.is_set(),
            )
            decoder.run(pull, deliver)
            self._num_tokens += decoder.num_tokens

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
                self._decode(pull, deliver)
        except Exception as error:
            pull()
            for answer in waiting.values():
                answer.set_exception(error)

    def _ticket(self, number: int, request: ModelRequest) -> Ticket:
        params, ids = request.gconfig, request.input_ids
        room = self.max_model_len - len(ids)
        if not ids or room < 1:
            raise ValueError(
                f"request {request.rid}: {len(ids)} prompt tokens, allowed are 1 to {self.max_model_len - 1}"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"request {request.rid}: a token id is outside the vocabulary of {self.vocab_size}")
        if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
            raise ValueError(f"request {request.rid}: impossible sampling parameters {params}")
        self._num_requests += 1
        stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self.eos_token_ids
        return Ticket(number, request, tuple(dict.fromkeys(stops)), min(params.max_new_tokens, room))


def _eos_of(model: Any) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _use_grouped_attention(model: Any, max_model_len: int) -> None:
    """Let the model attend through our cache; refuse what it cannot hold."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise RolloutError(f"HFRollout has no cache for layers of type {sorted(kinds)}: use another rollout engine")
    if "sliding_attention" in kinds and window and window < max_model_len:
        raise RolloutError(
            f"HFRollout does not slide its cache: set max_model_len to at most the model's window of {window}, "
            "or use another rollout engine"
        )
    capped = getattr(text, "attn_logit_softcapping", None)
    model.set_attn_implementation("eager" if capped or not model._supports_sdpa else ATTENTION)
