"""Responses in progress, assembled from what engines sample between two exchanges."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from rlsys.interfaces import RolloutEngine
from rlsys.types import Finish, ModelRequest, ModelResponse, ResponseDelta
from rlsys.utils.errors import RolloutError, WeightTransferError

EXCHANGE_WAIT_S = 0.05
BATCH_WAIT_S = 0.5
"""Of requests that are waited for together: the engine answers at its reports and at their end, anyway."""


@dataclass
class PartialResponse:
    """The tokens of a request so far, of one or several engines and weight versions; `finish` once it is complete."""

    request: ModelRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    @classmethod
    def of(cls, request: ModelRequest, response: ModelResponse) -> "PartialResponse":
        """The request with the tokens of an earlier response to it, to be continued."""
        full, sampled = list(response.output_logprobs), list(response.sampled_logprobs)
        return cls(request, list(response.output_tokens), full, sampled, list(response.output_versions))

    def copy(self) -> "PartialResponse":
        """One that grows apart from this one."""
        lists = {name: getattr(self, name)[:] for name in ("tokens", "logprobs", "sampled_logprobs", "versions")}
        return replace(self, **lists)

    @property
    def room(self) -> int:
        """How many tokens the request may still get."""
        return self.request.gconfig.max_new_tokens - len(self.tokens)

    def rest(self, rid: str) -> ModelRequest:
        """The request for the tokens that are still missing."""
        params, num_done = self.request.gconfig, len(self.tokens)
        params = replace(params, max_new_tokens=self.room, min_new_tokens=max(0, params.min_new_tokens - num_done))
        return replace(self.request, rid=rid, input_ids=(*self.request.input_ids, *self.tokens), gconfig=params)

    def add(self, delta: ResponseDelta) -> None:
        """Append what was sampled."""
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.sampled_logprobs += delta.sampled_logprobs
        self.versions += delta.versions
        self.finish, self.routed_experts = delta.finish, delta.routed_experts
        if delta.finish is Finish.ABORT:
            self.finish = None if self.room > 0 else Finish.LENGTH

    def rewind(self, num_tokens: int) -> None:
        """Forget all but the first tokens."""
        for values in (self.tokens, self.logprobs, self.sampled_logprobs, self.versions):
            del values[num_tokens:]
        self.finish = None

    def response(self) -> ModelResponse:
        tokens, versions, end = tuple(self.tokens), tuple(self.versions), self.finish or Finish.ABORT
        full, sampled = tuple(self.logprobs), tuple(self.sampled_logprobs)
        given, routes = self.request, self.routed_experts
        return ModelResponse(given.rid, given.input_ids, tokens, full, sampled, versions, end, routes)


def complete(engine: RolloutEngine, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
    """Complete the requests on an engine that no other caller uses; responses in their order.

    ValueError for a request that cannot be served, RolloutError for one that failed.
    """
    partials = {f"{request.rid}#{at}": PartialResponse(request) for at, request in enumerate(requests)}
    new, left = [partial.rest(rid) for rid, partial in partials.items()], set(partials)
    try:
        while left:
            deltas, new = engine.exchange(new, wait_s=BATCH_WAIT_S), []
            for delta in deltas:
                partial = partials[delta.rid]
                if delta.error:
                    error = f"request {partial.request.rid}: {delta.error}"
                    raise ValueError(error) if delta.refused else RolloutError(error)
                partial.add(delta)
                if partial.finish is not None:
                    left.discard(delta.rid)
                elif delta.finish is Finish.ABORT:
                    new.append(partial.rest(delta.rid))
    except BaseException:
        with suppress(WeightTransferError, RolloutError):
            engine.exchange(wait_s=0.0, cancel=left)
        raise
    return [partial.response() for partial in partials.values()]
