"""Texts to learn from: conversations or prompt and response (SFT), and pairs of a better and a worse response (RM)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from rlsys.config.schema.data import RMDataConfig, SFTDataConfig, SupervisedDataConfig
from rlsys.data.bad_rows import parse_rows
from rlsys.data.chat import Message, as_messages, encode_conversation, kept_positions
from rlsys.data.dataset import VerlDataset, sample_rows, source_rows
from rlsys.data.rows import ANSWERS, QUESTIONS, Need, check_columns, plain_values, read_messages, read_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedText:
    """A prompt and its continuation; `mask` is 1 on the tokens of `response_ids` that are learnt."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]


def fingerprint(rows: Sequence[Sequence[TokenizedText]]) -> str:
    """Identifies the rows and their order, for the cursor."""
    digest = sha256()
    for text in (text for row in rows for text in row):
        digest.update(array("q", [*text.prompt_ids, -1, *text.response_ids, -2]).tobytes())
    return digest.hexdigest()[:16]


def load_texts(
    source: str | Sequence[str] | VerlDataset,
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedDataConfig | None = None,
    *,
    max_samples: int = -1,
    shuffle: bool = False,
) -> list[list[TokenizedText]]:
    """Rows out of files or a dataset object: one text each for SFT, the better and the worse one for a reward model.

    `max_samples` and `shuffle` as for prompts.
    Raises DataError with file and row, ConfigError for missing files.
    """
    config = config or SFTDataConfig()
    rows = sample_rows(source_rows(source, config.prompt_key), max_samples, seed=config.seed if shuffle else None)
    return parse_rows(rows, lambda row: parse_row(row.values, tokenizer, config), bad_rows=config.bad_rows)[0]


def parse_row(
    values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, config: SupervisedDataConfig
) -> list[TokenizedText]:
    """The text or the two texts of one row. Raises ValueError for a bad one."""
    texts = [encode(tokenizer, messages, config) for messages in read_conversations(values, config)]
    if isinstance(config, RMDataConfig) and list(texts[0].response_ids) == list(texts[1].response_ids):
        raise ValueError(f"columns {config.chosen_key!r} and {config.rejected_key!r} are the same")
    return texts


def read_conversations(values: Mapping[str, Any], config: SupervisedDataConfig) -> list[list[Message]]:
    """The conversation of a row for SFT; for a reward model those with the better and with the worse response.

    Without a column of the conversation it is made of those of prompt and response. Raises ValueError.
    """
    values = plain_values(values)
    prompt_key, otherwise = config.prompt_key, ""
    needs = [Need((prompt_key,), "data.prompt_key", QUESTIONS)]
    if isinstance(config, RMDataConfig):
        needs.append(Need((config.chosen_key,), "data.chosen_key", ("better", "preferred", "accepted")))
        needs.append(Need((config.rejected_key,), "data.rejected_key", ("worse", "other")))
    elif isinstance(config, SFTDataConfig):
        if config.messages_key in values:
            return [read_messages(values[config.messages_key], config.messages_key)]
        if config.messages_key is not None:
            otherwise = f" (a conversation would be in {config.messages_key!r}: data.messages_key)"
        needs.append(Need((config.response_key,), "data.response_key", ANSWERS, otherwise))
    check_columns(values, needs)
    prompt = as_messages(read_prompt(values[prompt_key], prompt_key))
    return [[*prompt, *_answer(values[key], key)] for (key,) in (need.columns for need in needs[1:])]


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


def _answer(value: Any, key: str) -> list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"column {key!r} is blank")
        return [{"role": "assistant", "content": value}]
    messages = read_messages(value, key)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"column {key!r}: its last message is not the assistant's")
    return messages
