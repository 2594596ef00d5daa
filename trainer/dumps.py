"""What was generated, for people: JSON lines and a page to browse them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlsys.config.schema.trainer import TrainerConfig
from rlsys.data.chat import with_parts
from rlsys.protocol import IMAGES, DataProto, response_lengths
from rlsys.telemetry.rollouts import dump_rollouts, token_texts_of
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import DeadlineError

SHOWN = ("rollout_log_probs", "advantages", "weight_versions", "turn_ids")
SHOWN_VALUES = {"log_probs": "old_log_probs", **{name: name for name in SHOWN}}
"""Values per token on the page, and the columns of a batch that have them."""
T = TypeVar("T")


class _Lazy(Sequence[T]):
    """Rows that are made when they are asked for: of a big batch only a sample is."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> T:  # pyrefly: ignore[bad-override]  # slices are not asked for
        if row >= self._length:
            raise IndexError(row)
        return self._make(row)


def dump(batch: DataProto, step: int, folder: Path, tokenizer: Tokenizer, *, max_mb: float | None = None) -> Path:
    """Write the rows of a batch as `{folder}/{step}.jsonl` and bring `{folder}/index.html` up to date.

    With `max_mb` a sample of a big batch, see `dump_rollouts`.
    """
    rows, columns, size = batch.tensors, batch.non_tensor_batch, len(batch)
    lengths = response_lengths(batch).tolist()

    @cache
    def text_of(ids: tuple[int, ...], *, skip: bool) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip))

    def of_tokens(key: str) -> _Lazy[list[int]]:
        return _Lazy(size, lambda row: rows[key][row, : lengths[row]].tolist())

    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    fast = None if cleans else getattr(tokenizer, "backend_tokenizer", None)  # thrice as fast as transformers

    def piece_of(ids: list[int]) -> str:
        return str(fast.decode(ids, skip_special_tokens=False)) if fast else text_of(tuple(ids), skip=False)

    tokens = of_tokens("responses")
    shown = {name: of_tokens(key) for name, key in SHOWN_VALUES.items() if key in set(rows.keys())}
    if "weight_versions" in shown and len(rows["weight_versions"].unique()) < 3:  # one version, and -1 where none is
        del shown["weight_versions"]
    return dump_rollouts(
        folder,
        step=step,
        inputs=[text_of(tuple(_prompt_ids(rows, row)), skip=True) for row in range(size)],
        outputs=_Lazy(size, lambda row: str(tokenizer.decode(tokens[row], skip_special_tokens=True))),
        gts=[model.get("ground_truth") if isinstance(model, dict) else None for model in columns["reward_model"]],
        scores=rows["token_level_scores"].sum(-1).tolist(),
        extras={name: list(columns[name]) for name in batch.meta_info.get("reward_extra_keys", ())},
        about={name: list(columns[name]) for name in ("data_source", "finish_reason") if name in columns},
        messages=[_messages(columns, row) for row in range(size)] if "raw_prompt" in columns else None,
        token_texts=_Lazy(size, lambda row: token_texts_of(tokens[row], piece_of)),
        token_values={"token_ids": tokens, **shown},
        max_mb=max_mb,
    )


def _messages(columns: Mapping[str, Any], row: int) -> list[object]:
    """The messages of a prompt, in which its images, and first frames of videos, stand at their markers."""
    messages, images = list(columns["raw_prompt"][row]), columns[IMAGES][row] if IMAGES in columns else ()
    pictures = [picture for inputs in images for picture in zip(inputs.shas, inputs.pictures, strict=True)]
    parts = iter([{"type": "image", "sha": sha, "image": data} for sha, data in pictures])
    return [with_parts(message, lambda _: next(parts)) for message in messages] if pictures else messages


class BackgroundDumps:
    """Dumps of training steps, written by a thread with its own tokenizer while the next step runs.

    At most one is being written; its error is raised by the next call. After one that took longer than deadlines.save_s
    (DeadlineError) nothing more is written. The batch must not change meanwhile.
    """

    def __init__(self, run: TrainerConfig, tokenizer: Tokenizer) -> None:
        """Writes to `run.rollout_data_dir`; nothing where that is null."""
        self.run, self.tokenizer, self._stuck = run, copy.deepcopy(tokenizer), False
        self._pending: Future[Path] | None = None

    def write(self, batch: DataProto, step: int) -> None:
        """Begin to write the rows of a step, once those of the step before are written."""
        self.settle()
        if self.run.rollout_data_dir is not None and not self._stuck:
            folder = Path(self.run.rollout_data_dir)
            call = partial(dump, batch, step, folder, self.tokenizer, max_mb=self.run.rollout_data_max_mb)
            self._pending = in_daemon_thread(call, name="dumps")

    def settle(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        deadline_s = self.run.deadlines.save_s
        if not wait([pending], deadline_s).done:
            self._stuck = True
            raise DeadlineError(f"the folder {self.run.rollout_data_dir}", "dump_rollouts", deadline_s)
        pending.result()


def sample_rows(batch: DataProto, tokenizer: Tokenizer, count: int, *, seed: int) -> list[tuple[str, str, float]]:
    """`count` rows drawn by seed as (prompt, answer, score), for the trackers' tables."""
    batch = batch.select_idxs(torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))[:count])
    rows, lengths = batch.tensors, response_lengths(batch).tolist()
    scores = rows["token_level_scores"].sum(-1).tolist()

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return [
        (text(_prompt_ids(rows, row)), text(rows["responses"][row, : lengths[row]].tolist()), scores[row])
        for row in range(len(batch))
    ]


def _prompt_ids(rows: TensorDict, row: int) -> list[int]:
    prompts = rows["prompts"]
    return prompts[row][rows["attention_mask"][row, : prompts.shape[1]].bool()].tolist()
