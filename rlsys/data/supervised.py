"""Texts to learn from: conversations or prompt and response (SFT), pairs of a better and a worse response (RM, DPO),
and single responses with a label (KTO)."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from typing import Any

from rlsys.config.schema.data import DPODataConfig, RMDataConfig, SFTDataConfig, SupervisedDataConfig
from rlsys.data.chat import Message, Messages, Tokenizer, answers_in, as_messages, encode_conversation, kept_positions
from rlsys.data.dataset import VerlDataset, parse_rows, sample_rows, source_rows
from rlsys.data.rows import ANSWERS, QUESTIONS, Need, check_columns, guess, plain_values, read_messages, read_prompt

LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels of KTO as text, which cells of CSV files are."""
ANSWER_PARTS = ("content", "tool_calls", "reasoning_content", "thinking")


@dataclass(frozen=True)
class TokenizedText:
    """A prompt and its continuation; `mask` is 1 on the tokens of `response_ids` that are learnt.

    `is_desirable` is the label of a single response; `is_truncated` says whether it is cut to the longest length.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]
    is_desirable: bool | None = None
    is_truncated: bool = False


def fingerprint(rows: Sequence[Sequence[TokenizedText]]) -> str:
    """Identifies the rows and their order, for the cursor."""
    digest = sha256()
    for text in (text for row in rows for text in row):
        digest.update(array("q", [*text.prompt_ids, -1, *text.response_ids, -3 if text.is_desirable else -2]).tobytes())
    return digest.hexdigest()[:16]


def load_texts(
    source: str | Sequence[str] | VerlDataset,
    tokenizer: Tokenizer,
    config: SupervisedDataConfig = SFTDataConfig(),  # noqa: B008
    *,
    is_kto: bool = False,
    max_samples: int = -1,
    shuffle: bool = False,
) -> list[list[TokenizedText]]:
    """Rows out of files or a dataset object: one text each for SFT, the better and the worse one for RM and DPO.

    For KTO a labelled one and its prompt with the response of the next row. `max_samples`, `shuffle` as for prompts.
    Raises DataError with file and row, ConfigError for missing files.
    """
    rows = sample_rows(source_rows(source, config.prompt_key), max_samples, seed=config.seed if shuffle else None)
    texts, _ = parse_rows(rows, lambda row: parse_row(row.values, tokenizer, config, is_kto), bad_rows=config.bad_rows)
    if is_kto:
        for row, (other, *_) in zip(texts, [*texts[1:], *texts[:1]], strict=True):  # for KTO's reference point
            room = config.max_length - len(row[0].prompt_ids)
            row.append(TokenizedText(row[0].prompt_ids, other.response_ids[:room], other.mask[:room]))
    return texts


def parse_row(
    row: Mapping[str, object], tokenizer: Tokenizer, config: SupervisedDataConfig, is_kto: bool = False
) -> list[TokenizedText]:
    """The text or the two texts of one row. Raises ValueError for a bad one."""
    conversations, label = read_conversations(row, config, is_kto)
    num_prompt = _num_shared(conversations) if len(conversations) > 1 else 0
    texts = [replace(encode(tokenizer, one, config, num_prompt), is_desirable=label) for one in conversations]
    if isinstance(config, RMDataConfig) and not is_kto and list(texts[0].response_ids) == list(texts[1].response_ids):
        raise ValueError(f"columns {config.chosen_key!r} and {config.rejected_key!r} are the same")
    return texts


def read_conversations(
    row: Mapping[str, object], config: SupervisedDataConfig, is_kto: bool = False
) -> tuple[list[Messages], bool | None]:
    """The conversation of a row for SFT, and KTO with its label; for RM and DPO those with the better and the worse
    response.

    Without a column of the conversation it is made of those of prompt and response, of which the former is not learnt
    (weight 0); the columns of a pair may also hold whole conversations. Raises ValueError.
    """
    values = dict(plain_values(row))
    parts = {column: value for column, value in values.items() if isinstance(value, dict)}
    values |= {f"{column}.{name}": item for column, part in parts.items() for name, item in part.items()}
    prompt_key, label = config.prompt_key, None
    otherwise = ", or another dpo.loss_type" if isinstance(config, DPODataConfig) else ""
    if isinstance(config, SFTDataConfig):
        prompt_key = ".".join((prompt_key, *(config.prompt_dict_keys or ())))
    needs = [Need((prompt_key,), "data.prompt_key", QUESTIONS)]
    if isinstance(config, DPODataConfig) and is_kto:
        needs.append(Need((config.completion_key,), "data.completion_key", ANSWERS))
        labels = Need((config.label_key,), "data.label_key", ("desirable", "score", "rating"), otherwise)
        check_columns(values, [*needs, labels])
        if (label := LABELS.get(str(values[config.label_key]).lower())) is None:
            raise ValueError(f"column {config.label_key!r} must be true or false")
    elif isinstance(config, RMDataConfig):
        keys = (config.chosen_key, config.rejected_key)
        if all(_has_prompt(values.get(key)) for key in keys):
            return [_answer(values[key], key) for key in keys], None
        needs.append(Need((config.chosen_key,), "data.chosen_key", ("better", "preferred", "accepted")))
        needs.append(Need((config.rejected_key,), "data.rejected_key", ("worse", "other"), otherwise))
    elif isinstance(config, SFTDataConfig):
        if config.messages_key in values:
            return [read_messages(values[config.messages_key], config.messages_key)], None
        if config.messages_key is not None:
            otherwise = f", or for a conversation data.messages_key={guess(values, ('conversations', 'conversation'))}"
        response_key = ".".join((config.response_key, *(config.response_dict_keys or ())))
        needs.append(Need((response_key,), "data.response_key", ANSWERS, otherwise))
    check_columns(values, needs)
    prompt = [{**m, "weight": 0} for m in as_messages(read_prompt(values[prompt_key], prompt_key))]
    return [[*prompt, *_answer(values[key], key)] for (key,) in (need.columns for need in needs[1:])], label


def encode(tokenizer: Tokenizer, messages: Messages, config: SupervisedDataConfig, num_prompt: int) -> TokenizedText:
    """Tokens of a conversation within `max_length`, of which the first `num_prompt` messages are not learnt.

    Raises ValueError when nothing to learn is left.
    """
    limit, kwargs = config.max_length, config.apply_chat_template_kwargs
    for place in answers_in(messages, num_prompt):
        if not any(str(messages[place].get(name) or "").strip() for name in ANSWER_PARTS):
            raise ValueError(f"message {place} is a blank answer: remove it, or give it `weight: 0`")
    prompt, response, mask = encode_conversation(tokenizer, messages, num_prompt=num_prompt, template_kwargs=kwargs)
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
    return TokenizedText(array("i", prompt), array("i", response), array("b", mask), is_truncated=num_tokens > limit)


def _num_shared(conversations: Sequence[Messages]) -> int:
    """How many messages before the last one are the same in all conversations."""
    shared = zip(*(messages[:-1] for messages in conversations), strict=False)
    number = len(list(takewhile(lambda same: all(message == same[0] for message in same), shared)))
    if any(messages[number]["role"] == "user" for messages in conversations):
        raise ValueError("the prompts of the responses differ: give both the same messages before their answers")
    return number


def _has_prompt(value: object) -> bool:
    """Whether a response column holds a whole conversation."""
    return isinstance(value, list) and bool(value) and dict(value[0]).get("role", "assistant") != "assistant"


def _answer(value: Any, key: str) -> list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"column {key!r} is blank")
        return [{"role": "assistant", "content": value}]
    messages = read_messages(value, key, what="text or a list of messages")
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"column {key!r}: its last message is not the assistant's")
    return messages
