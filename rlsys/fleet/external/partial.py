"""A response in progress, assembled from the output of several servers or weight versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlsys.types import Finish, ModelRequest, ModelResponse

MAX_TOKEN_ID = 2**31
ABOVE_ZERO = 1e-3


@dataclass(frozen=True)
class Delta:
    """What one event of a stream adds. `stamps` are the server's names of its weights, "" if it gives none."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    stamps: Sequence[str] = ()
    finish: Finish | None = None


class BadResponseError(ValueError):
    """A server's answer is invalid."""


@dataclass
class ServedResponse:
    """The tokens of a request so far; `finish` is set when it is complete, `server` is the last one that served it."""

    request: ModelRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    server: str = ""

    @property
    def room(self) -> int:
        return self.request.gconfig.max_new_tokens - len(self.tokens)

    def rest(self) -> ModelRequest:
        """The request for the tokens that are still missing."""
        params, num_done = self.request.gconfig, len(self.tokens)
        least = max(0, params.min_new_tokens - num_done)
        return replace(
            self.request,
            input_ids=self.request.input_ids + tuple(self.tokens),
            gconfig=replace(params, max_new_tokens=self.room, min_new_tokens=least),
        )

    def add(self, delta: Delta, versions: Sequence[int]) -> None:
        """Append a delta whose tokens have these weight versions; BadResponseError leaves the partial unchanged."""
        check(delta, room=self.room)
        if delta.finish is Finish.STOP and not (self.tokens or delta.tokens):
            raise BadResponseError("an answer that stopped without a stop token")
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.versions += versions
        if delta.finish in (Finish.STOP, Finish.LENGTH) or self.room == 0:
            self.finish = Finish.LENGTH if delta.finish in (None, Finish.ABORT) else delta.finish

    def response(self) -> ModelResponse:
        sampled = [0.0] * len(self.tokens) if self.request.gconfig.greedy else self.logprobs
        return ModelResponse(
            self.request.rid,
            self.request.input_ids,
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(sampled),
            tuple(self.versions),
            self.finish or Finish.ABORT,
        )


def check(delta: Delta, *, room: int) -> None:
    """BadResponseError unless there are at most `room` tokens, each an id with a finite log-probability."""
    if len(delta.tokens) > room:
        raise BadResponseError(f"{len(delta.tokens)} tokens where at most {room} were requested")
    if len(delta.logprobs) != len(delta.tokens):
        raise BadResponseError(f"{len(delta.tokens)} tokens with {len(delta.logprobs)} log-probabilities")
    for token in delta.tokens:
        if type(token) is not int or not 0 <= token < MAX_TOKEN_ID:
            raise BadResponseError(f"'{str(token)[:40]}' is not a token id")
    for value in delta.logprobs:
        if type(value) not in (int, float) or not math.isfinite(value) or value > ABOVE_ZERO:
            raise BadResponseError(f"'{str(value)[:40]}' is not a log-probability")
