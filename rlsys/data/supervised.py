"""Texts to learn from: conversations or prompt and response (SFT), and pairs of a better and a worse response (RM)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlsys.data.chat import Message, Truncation, as_messages, encode_conversation
from rlsys.data.dataset import VerlDataset, rows_of, sample
from rlsys.data.files import BadRow, Row, read_rows
from rlsys.data.policy import BadRowPolicy, read_all
from rlsys.data.rows import plain, read_messages, read_prompt
from rlsys.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Text:
    """A prompt and what follows it; `mask` is 1 on the tokens of `response_ids` that are to be learnt."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt."""

    chosen: Text
    rejected: Text


T = TypeVar("T", Text, Pair)


class SupervisedDataset(Generic[T]):
    """Texts or pairs by position."""

    def __init__(self, rows: Sequence[T], *, bad_rows: Sequence[BadRow] = ()) -> None:
        self._rows, self.bad_rows = rows, tuple(bad_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> T:
        return self._rows[index]

    @property
    def fingerprint(self) -> str:
        """Identifies the rows and their order, for the cursor."""
        digest = sha256()
        for row in self._rows:
            for text in (row,) if isinstance(row, Text) else (row.chosen, row.rejected):
                digest.update(array("q", [*text.prompt_ids, -1, *text.response_ids, -2]).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TextFormat:
    """How rows become texts; the names are keys of the config's `data` section.

    With `messages_key` a row holds a conversation of which all answers are learnt; without it `prompt_key` and
    `response_key` are read. A text over `max_length` tokens loses its start (left), its end (right) or its middle, or
    is a bad row (error).
    """

    messages_key: str | None = "messages"
    prompt_key: str = "prompt"
    response_key: str = "response"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    max_length: int = 1024
    truncation: Truncation = "error"
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.truncation not in ("error", "left", "right", "middle"):
            raise ConfigError(f"data.truncation={self.truncation}: must be error, left, right or middle")
        if self.max_length < 2:
            raise ConfigError(f"data.max_length={self.max_length}: must be at least 2")


def _load(
    read: Callable[[Row, PreTrainedTokenizerBase, TextFormat], T],
    files: str | Sequence[str] | VerlDataset,
    tokenizer: PreTrainedTokenizerBase,
    form: TextFormat | None = None,
    *,
    max_samples: int = -1,
    shuffle: bool = False,
    seed: int = 1,
    bad_rows: BadRowPolicy = "refuse",
) -> SupervisedDataset[T]:
    """The rows of all files, or of a dataset object; `max_samples` as for prompts. Raises DataError with file and row,
    ConfigError for missing files."""
    how = form or TextFormat()
    source: Any = files
    found = read_rows(source) if isinstance(files, str | list | tuple) else rows_of(source, how.prompt_key)
    rows = sample(found, max_samples, seed=seed if shuffle else None)
    good, bad = read_all(rows, lambda row: read(row, tokenizer, how), bad_rows=bad_rows)
    return SupervisedDataset(good, bad_rows=bad)


def read_text(row: Row, tokenizer: PreTrainedTokenizerBase, form: TextFormat) -> Text:
    """One row for SFT. Raises ValueError for a bad one."""
    values = plain(row.values)
    if form.messages_key is not None:
        messages = read_messages(values.get(form.messages_key), form.messages_key)
    else:
        messages = [*_prompt(values, form), *_answer(values.get(form.response_key), form.response_key)]
    return encode(tokenizer, messages, form)


def read_pair(row: Row, tokenizer: PreTrainedTokenizerBase, form: TextFormat) -> Pair:
    """One row for a reward model; the responses are texts or lists of messages. Raises ValueError for a bad one."""
    values = plain(row.values)
    prompt = _prompt(values, form)
    chosen, rejected = (
        encode(tokenizer, [*prompt, *_answer(values.get(key), key)], form)
        for key in (form.chosen_key, form.rejected_key)
    )
    if list(chosen.response_ids) == list(rejected.response_ids):
        raise ValueError(f"columns {form.chosen_key!r} and {form.rejected_key!r} are the same")
    return Pair(chosen, rejected)


load_texts = partial(_load, read_text)
"""Rows for SFT."""
load_pairs = partial(_load, read_pair)
"""Rows for a reward model."""


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], form: TextFormat) -> Text:
    """Tokens of a conversation within `max_length`. Raises ValueError when nothing to learn is left."""
    prompt, response, mask = encode_conversation(tokenizer, messages, template_kwargs=form.template_kwargs)
    num_tokens = len(prompt) + len(response)
    if num_tokens > form.max_length:
        if form.truncation == "error":
            raise ValueError(f"{num_tokens} tokens are more than max_length={form.max_length}")
        kept = kept_positions(num_tokens, form.max_length, form.truncation)
        split = len(prompt)
        prompt = [prompt[i] for i in kept if i < split]
        response, mask = ([part[i - split] for i in kept if i >= split] for part in (response, mask))
    if not prompt or not any(mask):
        raise ValueError(f"with max_length={form.max_length} no prompt or nothing to learn is left")
    return Text(array("i", prompt), array("i", response), array("b", mask))


def kept_positions(num_tokens: int, max_tokens: int, how: Truncation) -> list[int]:
    """Positions that remain without the `left`, `right` or `middle` of a text."""
    head = {"left": 0, "right": max_tokens, "middle": max_tokens // 2}[how]
    return [*range(head), *range(num_tokens - (max_tokens - head), num_tokens)]


def _prompt(values: Mapping[str, Any], form: TextFormat) -> list[Message]:
    return as_messages(read_prompt(values.get(form.prompt_key), form.prompt_key))


def _answer(value: Any, key: str) -> list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"column {key!r} is blank")
        return [{"role": "assistant", "content": value}]
    messages = read_messages(value, key)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"column {key!r}: its last message is not the assistant's")
    return messages
