"""Our draws inside SGLang's scheduler process: tokens and both log-probabilities, the same on every rank.

A request says how it draws in its name (`request_name`), which SGLang carries to every rank and into every batch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.rollout.sampling.hook import DrawParams, RowSampler
from rlsys.rollout.sampling.log import DrawLog

BAR = "|"


def request_name(draw: DrawParams) -> str:
    """A name that begins with the draw's number, of fixed width since SGLang aborts by prefix."""
    values = draw.to_dict()
    number = values.pop("number")
    if not draw.min_new_tokens:
        values["stop_ids"] = []
    return f"{number:012d}{BAR}{json.dumps(list(values.values()), separators=(',', ':'))}"


@lru_cache(maxsize=1 << 16)
def draw_of(name: str) -> DrawParams | None:
    """The draw of a request; None for requests that are not ours."""
    number, bar, text = name.partition(BAR)
    if not bar or not number.isdigit():
        return None
    prompt_length, seed, temperature, top_p, top_k, min_new_tokens, stop_ids = json.loads(text)
    return DrawParams(int(number), prompt_length, seed, temperature, top_p, top_k, min_new_tokens, tuple(stop_ids))


class Draws:
    """Draws for the batches of one scheduler process; only the first rank of a replica keeps a log."""

    def __init__(self, seed: int, device: torch.device, *, logged: bool) -> None:
        self.rows = RowSampler(seed, device, logged=logged)
        self._names: Sequence[str] = ()
        self._lock = threading.Lock()

    def force(self, logits: Tensor, names: Sequence[str], last_positions: Tensor) -> None:
        """Change the logits (N, V) so that greedy decoding takes what we draw after `last_positions` (N,)."""
        found = [draw_of(name) for name in names]
        rows = [draw for draw in found if draw is not None]
        if len(rows) < len(found):
            return
        with self._lock:
            if names != self._names:
                self.rows.set_rows(rows)
                self._names = names
            self.rows.force(logits, last_positions + 1)

    def take(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """How many tokens each request drew, and all of them: (T, 4) token, full, sampled, finite."""
        with self._lock:
            return self.rows.log.take(numbers)

    def forget(self) -> None:
        """Drop what nobody will ask for: draws made after a request had ended."""
        with self._lock:
            self.rows.log, self._names = DrawLog(), ()


def install(draws_of: Any) -> None:
    """Let SGLang's model runner take our draws; `draws_of(runner)` are those of a runner, or None."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.sample

    def sample(self: Any, logits_output: Any, forward_batch: Any) -> Any:
        draws = draws_of(self)
        if draws is not None and forward_batch.rids:
            mode = forward_batch.forward_mode
            last = forward_batch.positions if mode.is_decode() else forward_batch.seq_lens - 1
            logits = logits_output.next_token_logits
            draws.force(logits, forward_batch.rids, last[: logits.shape[0]])
        return original(self, logits_output, forward_batch)

    ModelRunner.sample = sample
