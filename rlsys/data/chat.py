"""From messages to token ids: chat templates, plain text where there is none, truncation."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rlsys.config.schema.data import Truncation
from rlsys.utils.errors import raised_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKERS = re.compile("(<image>|<video>)")
"""Where an image or a video stands in the text of a message."""

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Message = Mapping[str, Any]
"""A role, a content, and what else the chat template reads: name, tool_calls, reasoning_content, ..."""
Messages = Sequence[Message]
Prompt = str | Messages
Kwargs = Mapping[str, Any]
"""What a chat template gets beside the messages."""


def as_messages(prompt: Prompt) -> list[Message]:
    """The messages of a prompt; a text is one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def with_parts(message: Message, part_of: Callable[[str], Mapping[str, object]]) -> Message:
    """A message whose content is a list of parts, `part_of` each marker in its order; without any it stays text."""
    pieces = MARKERS.split(message["content"])
    if len(pieces) == 1:
        return message
    parts = [part_of(piece) if number % 2 else {"type": "text", "text": piece} for number, piece in enumerate(pieces)]
    return {**message, "content": [part for part, piece in zip(parts, pieces, strict=True) if piece]}


def render(
    tokenizer: Tokenizer, messages: Messages, *, add_generation_prompt: bool, template_kwargs: Kwargs | None = None
) -> str:
    """The text of a conversation by the tokenizer's chat template; without one, the contents joined by newlines.

    Raises ValueError if the template rejects the messages.
    """
    if not tokenizer.chat_template:
        return "\n".join(m["content"] for m in messages)
    turns, more, prompts = [dict(m) for m in messages], template_kwargs or {}, add_generation_prompt
    with raised_as(ValueError, "the chat template rejects the messages"):  # it is a program of the model's author
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompts, **more))


def encode_text(tokenizer: Tokenizer, text: str, *, special_tokens: bool = False) -> list[int]:
    """Token ids of a text; `special_tokens` adds the tokenizer's own at start and end.

    Half a surrogate pair, as in what a tool read from a file of another encoding, becomes "?".
    """
    return list(tokenizer(text.encode(errors="replace").decode(), add_special_tokens=special_tokens)["input_ids"])


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, *, template_kwargs: Kwargs) -> list[int]:
    """Token ids of a prompt; with a chat template a text is one user message."""
    text = render(tokenizer, as_messages(prompt), add_generation_prompt=True, template_kwargs=template_kwargs)
    return encode_text(tokenizer, text, special_tokens=not tokenizer.chat_template)


def answer_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's, and those of the generation_config.json beside it."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return tuple(sorted({*own, *_model_ends(tokenizer.name_or_path)}))


@cache
def _model_ends(folder: str) -> tuple[int, ...]:
    from rlsys.models.hf import end_ids, saved_generation  # torch, which reading rows does without

    return end_ids(saved_generation(folder))


def answers_in(messages: Messages, num_prompt: int) -> list[int]:
    """The places of the assistant's messages that are learnt: not the first `num_prompt`, nor those of `weight` 0."""
    turns = enumerate(messages[num_prompt:], num_prompt)
    return [place for place, message in turns if message["role"] == "assistant" and message.get("weight") != 0]


def encode_conversation(
    tokenizer: Tokenizer, messages: Messages, *, num_prompt: int = 0, template_kwargs: Kwargs | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Token ids up to the first answer, token ids from there on, and a mask of the latter: 1 on the assistant's tokens.

    The first `num_prompt` messages belong to the prompt, also those of the assistant; so do answers of `weight` 0.
    Each turn is tokenised separately, as it is during generation. An answer ends with one of `answer_ends`: that of the
    template, or else the tokenizer's is appended; what the template adds after it belongs to the next turn. Raises
    ValueError without an answer, and for a template that rewrites earlier turns.
    """
    text_of = partial(render, tokenizer, template_kwargs=template_kwargs, add_generation_prompt=False)
    answers = answers_in(messages, num_prompt)
    if not answers:
        raise ValueError("no assistant message to learn from")
    if answers[0] == 0:
        raise ValueError("the first message is the assistant's; there is no prompt before it")
    ends = set(answer_ends(tokenizer))
    tokens, mask, done = list[int](), list[int](), ""
    for answer in answers:
        before = render(tokenizer, messages[:answer], add_generation_prompt=True, template_kwargs=template_kwargs)
        after = text_of(messages[: answer + 1])
        plain = {key: value for key, value in messages[answer].items() if key != "tool_calls"}
        if messages[answer].get("tool_calls") and text_of([*messages[:answer], plain]) == after:
            raise ValueError(f"message {answer} has tool_calls, which the chat template does not render")
        if not before.startswith(done) or not after.startswith(before):
            raise ValueError("the chat template changes earlier turns: give all answers but the last `weight: 0`")
        asked = encode_text(tokenizer, before[len(done) :], special_tokens=not done and not tokenizer.chat_template)
        answered = encode_text(tokenizer, after[len(before) :])
        if ends.isdisjoint(answered) and tokenizer.eos_token_id is not None:
            answered.append(tokenizer.eos_token_id)
        end = max((at for at, token in enumerate(answered, 1) if token in ends), default=len(answered))
        tokens += [*asked, *answered]
        mask += [*[0] * len(asked), *[1] * end, *[0] * (len(answered) - end)]
        done = after
    start, end = mask.index(1), len(mask) - mask[::-1].index(1)
    return tokens[:start], tokens[start:end], mask[start:end]


def truncate(token_ids: Sequence[int], max_tokens: int, how: Truncation) -> list[int]:
    """At most `max_tokens` tokens, the `left`, `right` or `middle` cut off. Raises ValueError for `error`."""
    if len(token_ids) <= max_tokens:
        return list(token_ids)
    if how == "error":
        fix = "raise it, or set data.filter_overlong_prompts=true or data.truncation=left"
        raise ValueError(f"{len(token_ids)} tokens are more than data.max_prompt_length={max_tokens} ({fix})")
    return [token_ids[i] for i in kept_positions(len(token_ids), max_tokens, how)]


def kept_positions(num_tokens: int, max_tokens: int, how: Truncation) -> list[int]:
    """Positions that remain when the `left`, `right` or `middle` is cut off."""
    head = {"left": 0, "right": max_tokens, "middle": max_tokens // 2}[how]
    return [*range(head), *range(num_tokens - (max_tokens - head), num_tokens)]
