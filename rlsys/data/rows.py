"""Prompt rows: verl's columns, checked one by one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from rlsys.config.schema.data import PromptsConfig
from rlsys.config.schema.jobs import GradedJob
from rlsys.data.chat import MARKERS, Message, Prompt
from rlsys.data.images import IMAGE_PARTS
from rlsys.data.videos import VIDEO_PARTS, as_video

if TYPE_CHECKING:
    from rlsys.protocol import ImageInputs

ROLES = ("system", "user", "assistant", "tool", "developer", "ipython")
MAX_PROMPT_CHARS = 4_000_000
OWN_COLUMNS = ("data_source", "reward_model", "extra_info", "ability")
QUESTIONS = ("question", "problem", "query", "instruction", "input", "text")
ANSWERS = ("answer", "solution", "target", "label", "completion", "output", "response")
SOURCES = ("source", "dataset", "task")
ONE_FUNCTION = ", or reward.custom_reward_function.path=<file> to grade all rows by one function"


@dataclass(frozen=True)
class PromptRow:
    """A prompt to be answered and what its grader needs. `fields` are the row's other columns.

    Its dataset sets `token_ids`, whether these are cut to the longest prompt, and `index`, the position in the dataset,
    and for a vision-language model the hashes of its `images`, which may be videos, and `load_images`, which decodes
    and processes them.
    """

    raw_prompt: Prompt
    data_source: str
    reward_model: Mapping[str, Any]
    extra_info: Mapping[str, Any]
    ability: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    index: int = -1
    token_ids: Sequence[int] = ()
    is_truncated: bool = False
    images: Sequence[object] = ()
    image_shas: Sequence[str] = ()
    load_images: "Callable[[], tuple[ImageInputs, ...]] | None" = None


class MissingColumns(ValueError):
    """A row without columns that it must have; the message names the settings that name other ones."""


@dataclass(frozen=True)
class Need:
    """A row must have one of `columns`; `key` is the setting for another name, of which `usual` are good guesses."""

    columns: tuple[str, ...]
    key: str
    usual: tuple[str, ...]
    otherwise: str = ""


def check_columns(values: Mapping[str, Any], needs: Sequence[Need]) -> None:
    """MissingColumns with all that are missing and what to set for each."""
    missing = [
        f"column {need.columns[0]!r} is missing: set {need.key}={guess(values, need.usual)}{need.otherwise}"
        for need in needs
        if not any(column in values for column in need.columns)
    ]
    if missing:
        raise MissingColumns("; ".join([*missing, f"the columns are {', '.join(map(repr, values)) or 'none'}"]))


def guess(values: Mapping[str, Any], usual: Sequence[str]) -> str:
    """The first of the usual names that a row has, as what to set."""
    return next((name for name in usual if name in values), "<column>")


def default_source(config: GradedJob) -> str | None:
    """The data source of rows without one, where a function, manager, workflow or reward model scores them all."""
    reward, rollout = config.reward, config.actor_rollout_ref.rollout
    return "custom" if reward.is_own or reward.has_head or rollout.may_score else None


def read_prompt_row(values: Mapping[str, Any], config: PromptsConfig, *, source: str | None = None) -> PromptRow:
    """A verl row, checked; `source` is its data source if it has none. Raises ValueError saying what is wrong with it.

    The column `data.answer_key`, or `ground_truth`, stands for a rule-based `reward_model`.
    """
    values, images = take_images(values, config.prompt_key, {"<image>": config.image_key, "<video>": config.video_key})
    values = plain_values(values)
    prompt_key, source_key, answer_key = config.prompt_key, config.reward_fn_key, config.answer_key
    truth = Need((answer_key,) if answer_key else ("reward_model", "ground_truth"), "data.answer_key", ANSWERS)
    needs = [Need((prompt_key,), "data.prompt_key", QUESTIONS), truth]
    if source is None:
        needs.append(Need((source_key,), "data.reward_fn_key", SOURCES, ONE_FUNCTION))
    check_columns(values, needs)
    if _listed(values.get("audios")):
        raise ValueError("column 'audios': rows with audios are not supported, only text, images and videos")
    known = {prompt_key, *truth.columns, *OWN_COLUMNS, "audios"}
    data_source: Any = source
    if source is None or source_key in values:
        data_source = _typed(_required(values, source_key), source_key, str)
        if not data_source.strip():
            raise ValueError(f"column {source_key!r} is blank")
    return PromptRow(
        raw_prompt=read_prompt(_required(values, prompt_key), prompt_key),
        data_source=data_source,
        reward_model=_reward_model(values, answer_key),
        extra_info=_typed(values.get("extra_info", {}), "extra_info", Mapping, default={}),
        ability=_typed(values.get("ability"), "ability", str, default=""),
        fields={n: value for n, value in {**values, source_key: data_source}.items() if n not in known},
        images=images,
    )


def take_images(
    values: Mapping[str, object], prompt_key: str, columns: Mapping[str, str]
) -> tuple[dict[str, object], tuple[object, ...]]:
    """The row without its images and videos, and these in the order of the prompt, in whose text each is a marker.

    They are those of the `columns` of each marker and of the content parts of messages. ValueError unless there is a
    marker for each of a column.
    """
    rest = {name: value for name, value in values.items() if name not in columns.values()}
    given = {marker: _listed(values.get(name)) for marker, name in columns.items()}
    prompt, inline = rest.get(prompt_key), list[tuple[str, object]]()
    if isinstance(prompt, str):
        inline += [(marker, None) for marker in MARKERS.findall(prompt)]
    elif isinstance(prompt, list | tuple) and all(isinstance(message, Mapping) for message in prompt):
        rest[prompt_key] = [{**message, "content": _text_of(message.get("content"), inline)} for message in prompt]
    if not any(given.values()) and all(value is None for _, value in inline):
        return rest, ()
    for marker, name in columns.items():
        num_markers = sum(one == marker and (value is None or value is ...) for one, value in inline)
        if num_markers != len(given[marker]):
            kind, there = marker[1:-1], f"and the prompt {num_markers} times {marker}"
            fix = f"put {marker} where each {kind} stands"
            raise ValueError(f"column {name!r} has {len(given[marker])} {kind}s {there}: {fix}")
    left = {marker: iter(held) for marker, held in given.items()}
    whole = [(marker, next(left[marker]) if one is None or one is ... else one) for marker, one in inline]
    return rest, tuple(as_video(value) if marker == "<video>" else value for marker, value in whole)


def _listed(column: object) -> list[object]:
    return [] if column is None else list(column) if isinstance(column, list | tuple) else [column]


def _text_of(content: Any, inline: list[tuple[str, object]]) -> Any:
    """A message's content as text. For each marker in it `inline` gets the marker and the image or video, or for one of
    a column None where the text has the marker, `...` where it is a content part."""
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        texts = []
        for part in content:
            kind = str(part.get("type"))
            marker, keys = ("<video>", VIDEO_PARTS) if kind in VIDEO_PARTS else ("<image>", IMAGE_PARTS)
            if kind in keys:
                texts.append(marker)
                value = part.get(keys[kind])
                inline.append((marker, ... if value is None else part if kind in VIDEO_PARTS else value))
            elif kind in ("text", "input_text"):
                texts.append(_text_of(part.get("text") or "", inline))
            else:
                raise ValueError(f"a content part of type {kind!r} is not supported, only text, images and videos")
        return "".join(texts) if all(isinstance(text, str) for text in texts) else content
    if isinstance(content, str):
        inline += [(marker, None) for marker in MARKERS.findall(content)]
    return content


def read_prompt(prompt: Any, name: str) -> str | list[Message]:
    """A prompt: text that is not blank, or messages whose user messages are not blank."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"column {name!r} is blank")
        _check_prompt_text(prompt, name)
        return prompt
    messages = read_messages(prompt, name, what="text or a list of messages")
    if not any(m["content"].strip() for m in messages):
        raise ValueError(f"column {name!r}: all messages are blank")
    return messages


def read_messages(messages: Any, name: str, *, what: str = "a list of messages") -> list[Message]:
    """A list of {role, content, ...}; a key that is null is left out. Raises ValueError."""
    if not isinstance(messages, list | tuple):
        raise ValueError(f"column {name!r} must be {what}, this is {type_name(messages)}")
    if not messages:
        raise ValueError(f"column {name!r} is an empty list")
    return [_message(m, f"column {name!r}, message {i}") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be {{role, content}}, this is {type_name(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("tool_calls"):
        message.setdefault("content", "")
    for key in ("role", "content"):
        if key not in message:
            sharegpt = "; rename its keys from and value to role and content, human to user, gpt to assistant"
            raise ValueError(f"{where} has no {key!r}{sharegpt if 'from' in message else ''}")
        if not isinstance(message[key], str):
            raise ValueError(f"{where}: its {key!r} must be text, this is {type_name(message[key])}")
    if message["role"] not in ROLES:
        raise ValueError(f"{where}: its role {message['role']!r} is not one of {', '.join(ROLES)}")
    if message["role"] == "user" and not message["content"].strip():
        raise ValueError(f"{where}: the user message is blank")
    _check_prompt_text(message["content"], where)
    return message


def _check_prompt_text(text: str, where: str) -> None:
    if len(text) > MAX_PROMPT_CHARS:
        raise ValueError(f"{where}: {len(text)} characters are more than {MAX_PROMPT_CHARS}")
    if "\0" in text:
        raise ValueError(f"{where} contains a NUL character")


def plain_values(value: Any, where: str = "the row", depth: int = 0) -> Any:
    """`value` as lists, dicts, numbers, text and None; times and decimals become text, arrays lists.

    Raises ValueError for anything else, for text that is not valid Unicode, and for values nested too deeply.
    """
    if depth > 100:
        raise ValueError(f"{where} is nested too deeply")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: the text is not valid Unicode at character {error.start}") from error
        return value
    if isinstance(value, Mapping):
        return {
            plain_values(k, where, depth + 1): plain_values(v, f"column {k!r}" if depth == 0 else where, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_values(item, where, depth + 1) for item in value]
    if isinstance(value, date | time | Decimal):
        return str(value)
    if hasattr(value, "tolist"):
        return plain_values(value.tolist(), where, depth + 1)
    raise ValueError(f"{where} must be text, numbers, lists or objects, this is {type_name(value)}")


def _required(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise ValueError(f"column {name!r} is null")
    return values[name]


def _typed(value: Any, name: str, kind: type, *, default: Any = None) -> Any:
    """The value of a column, `default` for null; ValueError if it is of another type."""
    value = default if value is None else value
    if not isinstance(value, kind):
        what = {str: "text", Mapping: "an object"}[kind]
        raise ValueError(f"column {name!r} must be {what}, this is {type_name(value)}")
    return value


def _reward_model(values: Mapping[str, Any], answer_key: str | None) -> dict[str, Any]:
    truth_key = answer_key or "ground_truth"
    if answer_key or (values.get("reward_model") is None and values.get(truth_key) is not None):
        model: Any = {"style": "rule", "ground_truth": _required(values, truth_key)}
    else:
        model = _required(values, "reward_model")
    _typed(model, "reward_model", Mapping)
    style = model.get("style", "rule")
    if not isinstance(style, str):
        raise ValueError(f"column 'reward_model': its style must be text, this is {type_name(style)}")
    truth = model.get("ground_truth")
    if truth is None and style != "model":
        raise ValueError("column 'reward_model' has no 'ground_truth'")
    if answer_key and isinstance(truth, str) and not truth.strip():
        raise ValueError(f"column {answer_key!r} is blank")
    if isinstance(truth, float) and not math.isfinite(truth):
        raise ValueError(f"column 'reward_model': its ground_truth is {truth}")
    return {**model, "style": style, "ground_truth": truth}


def type_name(value: object) -> str:
    """The type of a value as an error message calls it."""
    return "null" if value is None else f"a {type(value).__name__}"
