"""What was generated, for people: JSON lines and a page to browse them."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlsys.protocol import DataProto, response_lengths
from rlsys.telemetry.rollouts import dump_rollouts, ragged, token_texts_of_rows
from rlsys.utils.errors import DeadlineError

SHOWN_VALUES = {"log_probs": "old_log_probs", "rollout_log_probs": "rollout_log_probs", "advantages": "advantages"}
TURN_S = 0.0005
"""How long a dump keeps other threads waiting: the next step hands its requests through several of them."""


def dump(batch: DataProto, step: int, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write all rows of a batch as `{folder}/{step}.jsonl` and bring `{folder}/index.html` up to date."""
    rows = batch.tensors
    lengths = response_lengths(batch)
    tokens: Any = ragged(rows["responses"], lengths)
    values = {name: ragged(rows[key], lengths) for name, key in SHOWN_VALUES.items() if key in set(rows.keys())}
    extras = {name: list(batch.non_tensor_batch[name]) for name in batch.meta_info.get("reward_extra_keys", ())}

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return dump_rollouts(
        folder,
        step=step,
        inputs=prompt_texts(batch, tokenizer),
        outputs=response_texts(batch, tokenizer),
        gts=[_ground_truth(model) for model in batch.non_tensor_batch["reward_model"]],
        scores=rows["token_level_scores"].sum(-1).tolist(),
        extras=extras,
        token_texts=token_texts_of_rows(tokens, decode),
        token_values={"token_ids": tokens, **values},
    )


class BackgroundDumps:
    """Dumps of training steps, written beside the next step by a thread with a tokenizer of its own.

    One is on its way at most; what went wrong with it is raised by the next call, a DeadlineError if it takes longer
    than `deadline_s`. The batch must stay as it is.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, *, deadline_s: float = 600.0) -> None:
        self.folder, self.tokenizer, self.deadline_s = folder, copy.deepcopy(tokenizer), deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dumps")
        self._pending: Future[Path] | None = None

    def write(self, batch: DataProto, step: int) -> None:
        """Begin to write the rows of a step, once those of the step before are written."""
        self.settle()
        self._pending = self._thread.submit(self._dump, batch, step)

    def _dump(self, batch: DataProto, step: int) -> Path:
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        try:
            return dump(batch, step, self.folder, self.tokenizer)
        finally:
            sys.setswitchinterval(usual_s)

    def settle(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        done, _ = wait([pending], self.deadline_s)
        if not done:
            raise DeadlineError(f"the folder {self.folder}", "dump_rollouts", self.deadline_s)
        pending.result()

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._thread.shutdown(wait=False)


def sample_rows(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, count: int, *, seed: int
) -> list[tuple[str, str, float]]:
    """`count` rows drawn by seed as (prompt, answer, score), for the trackers' tables."""
    if count == 0:
        return []
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))[:count]
    chosen = batch.select_idxs(order)
    scores = chosen.tensors["token_level_scores"].sum(-1).tolist()
    return list(zip(prompt_texts(chosen, tokenizer), response_texts(chosen, tokenizer), scores))


def prompt_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The prompts without padding and special tokens."""
    width = batch.tensors["prompts"].shape[1]
    pairs = zip(batch.tensors["prompts"], batch.tensors["attention_mask"][:, :width].bool())
    return tokenizer.batch_decode([row[kept].tolist() for row, kept in pairs], skip_special_tokens=True)


def response_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The responses without padding and special tokens."""
    pairs = zip(batch.tensors["responses"], response_lengths(batch).tolist())
    return tokenizer.batch_decode([row[:n].tolist() for row, n in pairs], skip_special_tokens=True)


def _ground_truth(model: Any) -> Any:
    return model.get("ground_truth") if isinstance(model, dict) else None
