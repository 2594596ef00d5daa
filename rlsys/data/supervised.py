"""Texts to learn from: conversations or prompt and response (SFT), and pairs of a better and a worse response (RM)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlsys.config.schema.data import RMDataConfig, SFTDataConfig, SupervisedDataConfig
from rlsys.data.bad_rows import parse_rows
from rlsys.data.chat import Message, as_messages, encode_conversation, kept_positions
from rlsys.data.dataset import VerlDataset, sample_rows, source_rows
from rlsys.data.files import BadRow, Row
from rlsys.data.rows import ANSWERS, QUESTIONS, Need, check_columns, plain_values, read_messages, read_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedText:
    """A prompt and its continuation; `mask` is 1 on the tokens of `response_ids` that are learnt."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]


@dataclass(frozen=True)
class TokenizedPair:
    """Two responses to one prompt."""

    chosen: TokenizedText
    rejected: TokenizedText


T = TypeVar("T", TokenizedText, TokenizedPair)


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
            for text in (row,) if isinstance(row, TokenizedText) else (row.chosen, row.rejected):
                digest.update(array("q", [*text.prompt_ids, -1, *text.response_ids, -2]).tobytes())
        return digest.hexdigest()[:16]


def load_texts(
    source: str | Sequence[str] | VerlDataset,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTDataConfig | None = None,
    *,
    max_samples: int = -1,
    shuffle: bool = False,
) -> SupervisedDataset[TokenizedText]:
    """Rows for SFT out of files or a dataset object; `max_samples` and `shuffle` as for prompts.

    Raises DataError with file and row, ConfigError for missing files.
    """
    config = config or SFTDataConfig()
    rows = sample_rows(source_rows(source, config.prompt_key), max_samples, seed=config.seed if shuffle else None)
    good, bad = parse_rows(rows, lambda row: parse_text(row, tokenizer, config), bad_rows=config.bad_rows)
    return SupervisedDataset(good, bad_rows=bad)


def load_pairs(
    source: str | Sequence[str] | VerlDataset,
    tokenizer: PreTrainedTokenizerBase,
    config: RMDataConfig | None = None,
    *,
    max_samples: int = -1,
    shuffle: bool = False,
) -> SupervisedDataset[TokenizedPair]:
    """Rows for a reward model, as `load_texts`."""
    config = config or RMDataConfig()
    rows = sample_rows(source_rows(source, config.prompt_key), max_samples, seed=config.seed if shuffle else None)
    good, bad = parse_rows(rows, lambda row: parse_pair(row, tokenizer, config), bad_rows=config.bad_rows)
    return SupervisedDataset(good, bad_rows=bad)


def parse_text(row: Row, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig) -> TokenizedText:
    """One row for SFT. Raises ValueError for a bad one."""
    return encode(tokenizer, read_text(row.values, config), config)


def read_text(values: Mapping[str, Any], config: SFTDataConfig) -> list[Message]:
    """The conversation of one row, in its column or made of those of prompt and response. Raises ValueError."""
    values = plain_values(values)
    if config.messages_key in values:
        return read_messages(values[config.messages_key], config.messages_key)
    conversation = f" (a conversation would be in {config.messages_key!r}: data.messages_key)"
    response = Need(
        (config.response_key,), "data.response_key", ANSWERS, conversation if config.messages_key is not None else ""
    )
    check_columns(values, [Need((config.prompt_key,), "data.prompt_key", QUESTIONS), response])
    return [*_prompt(values, config.prompt_key), *_answer(values[config.response_key], config.response_key)]


def parse_pair(row: Row, tokenizer: PreTrainedTokenizerBase, config: RMDataConfig) -> TokenizedPair:
    """One row for a reward model; the responses are texts or lists of messages. Raises ValueError for a bad one."""
    chosen, rejected = (encode(tokenizer, messages, config) for messages in read_pair(row.values, config))
    if list(chosen.response_ids) == list(rejected.response_ids):
        raise ValueError(f"columns {config.chosen_key!r} and {config.rejected_key!r} are the same")
    return TokenizedPair(chosen, rejected)


def read_pair(values: Mapping[str, Any], config: RMDataConfig) -> tuple[list[Message], list[Message]]:
    """The conversations with the better and with the worse response. Raises ValueError."""
    values = plain_values(values)
    needs = [
        Need((config.prompt_key,), "data.prompt_key", QUESTIONS),
        Need((config.chosen_key,), "data.chosen_key", ("better", "preferred", "accepted")),
        Need((config.rejected_key,), "data.rejected_key", ("worse", "other")),
    ]
    check_columns(values, needs)
    prompt = _prompt(values, config.prompt_key)
    chosen, rejected = ([*prompt, *_answer(values[key], key)] for key in (config.chosen_key, config.rejected_key))
    return chosen, rejected


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], config: SupervisedDataConfig
) -> TokenizedText:
    """Tokens of a conversation within `max_length`. Raises ValueError when nothing to learn is left."""
    template_kwargs, limit = config.apply_chat_template_kwargs, config.max_length
    prompt, response, mask = encode_conversation(tokenizer, messages, template_kwargs=template_kwargs)
    num_tokens = len(prompt) + len(response)
    if num_tokens > limit:
        if config.truncation == "error":
            raise ValueError(f"{num_tokens} tokens are more than max_length={limit}")
        kept = kept_positions(num_tokens, limit, config.truncation)
        split = len(prompt)
        prompt = [prompt[i] for i in kept if i < split]
        response, mask = ([part[i - split] for i in kept if i >= split] for part in (response, mask))
    if not prompt or not any(mask):
        raise ValueError(f"with max_length={limit} no prompt or nothing to learn is left")
    return TokenizedText(array("i", prompt), array("i", response), array("b", mask))


def _prompt(values: Mapping[str, Any], key: str) -> list[Message]:
    return as_messages(read_prompt(values.get(key), key))


def _answer(value: Any, key: str) -> list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"column {key!r} is blank")
        return [{"role": "assistant", "content": value}]
    messages = read_messages(value, key)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"column {key!r}: its last message is not the assistant's")
    return messages
