"""Dotted overrides in Hydra's forms: key=value, +key=value (new), ++key=value (new or not), ~key (back to the default).

Values: null, true/false, numbers, text, 'quoted text', [lists], {dicts: of any}, and ${interpolations} that are left as
text for the loader. Text needs quotes where it holds a comma, or starts with a bracket or a quote. Unlike in Hydra
1_000 is text, because 0.5_2 means two bounds elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from rlsys.utils.errors import ConfigError

Op = Literal["", "+", "++", "~"]

_KEY = re.compile(r"[\w-]+(\.[\w-]+)*")
_INT = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)")
_NOT_FINITE = re.compile(r"[+-]?(inf|nan)", re.IGNORECASE)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_MAX_DEPTH = 50


@dataclass(frozen=True)
class Override:
    """One override. `value` is None for a bare ~key; `has_value` tells that apart from null."""

    op: Op
    key: str
    value: Any = None
    has_value: bool = True
    text: str = ""


def parse_override(text: str) -> Override:
    """The override that one argument stands for; ConfigError where it is none."""
    op, rest = _split_op(text)
    key, equals, value = rest.partition("=")
    key = key.strip()
    if not equals and op != "~":
        raise ConfigError(
            f"'{text}' is neither an option nor an override; write key=value, e.g. trainer.total_epochs=1"
        )
    if not _KEY.fullmatch(key):
        raise ConfigError(f"'{text}': '{key}' is no key; a key is names joined by dots, e.g. data.train_batch_size")
    if not equals:
        return Override(op, key, has_value=False, text=text)
    try:
        return Override(op, key, parse_value(value), text=text)
    except ValueError as error:
        raise ConfigError(f"{key} = {value}: {error}") from None


def _split_op(text: str) -> tuple[Op, str]:
    for op in ("++", "+", "~"):
        if text.startswith(op):
            return op, text[len(op) :]
    return "", text


def parse_value(text: str) -> Any:
    """The value that `text` stands for; ValueError says what is wrong with it."""
    text = text.strip()
    if not text or text[0] not in "[{'\"":
        end = _scan(text, 0, ",")
        if end < len(text):
            raise ValueError(f"a comma needs a list, ['{text[:end]}', ...], or quotes around the text, key=\"{text}\"")
        return _primitive(text)
    value, end = _parse(text, 0, 0)
    if text[end:].strip():
        raise ValueError(f"'{text[end:].strip()}' is left over after {text[:end]}; put quotes around the whole text")
    return value


def _parse(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that starts at `at`, inside `depth` brackets, and where it ends."""
    at = _skip_space(text, at)
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} brackets inside one another")
    if text[at : at + 1] in ("'", '"'):
        return _quoted(text, at)
    if text[at : at + 1] == "[":
        return _list(text, at, depth)
    if text[at : at + 1] == "{":
        return _dict(text, at, depth)
    end = _scan(text, at, ",]}")
    if not text[at:end].strip():
        raise ValueError(f"a value is missing in {text}")
    return _primitive(text[at:end].strip()), end


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _skip_space(text, at + 1)
    while text[at : at + 1] != "]":
        item, at = _parse(text, at, depth + 1)
        items.append(item)
        at = _separator(text, at, "]")
    return items, at + 1


def _dict(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    at = _skip_space(text, at + 1)
    while text[at : at + 1] != "}":
        if text[at : at + 1] in ("'", '"'):
            key, at = _quoted(text, at)
        else:
            end = _scan(text, at, ":,}]")
            key, at = text[at:end].strip(), end
        if not key or text[_skip_space(text, at) :][:1] != ":":
            raise ValueError(f"a dict is written {{name: value, ...}}, not {text}")
        items[key], at = _parse(text, _skip_space(text, at) + 1, depth + 1)
        at = _separator(text, at, "}")
    return items, at + 1


def _separator(text: str, at: int, close: str) -> int:
    at = _skip_space(text, at)
    if text[at : at + 1] == ",":
        at = _skip_space(text, at + 1)
        if text[at : at + 1] == close:
            raise ValueError(f"a value is missing after the last comma of {text}")
    elif text[at : at + 1] != close:
        raise ValueError(f"'{close}' is missing in {text}")
    return at


def _quoted(text: str, at: int) -> tuple[str, int]:
    """Quoted text; a backslash means something only before a quote of the same kind."""
    quote, out, i = text[at], [], at + 1
    while i < len(text):
        if text[i] == quote:
            return "".join(out), i + 1
        run = re.match(r"\\+", text[i:])
        slashes = len(run.group()) if run else 0
        if slashes and text[i + slashes : i + slashes + 1] == quote:
            out.append("\\" * (slashes // 2))
            i += slashes
            if slashes % 2:
                out.append(quote)
                i += 1
        else:
            out.append(text[i : i + max(slashes, 1)])
            i += max(slashes, 1)
    raise ValueError(f"the closing {quote} is missing in {text}")


def _scan(text: str, at: int, stops: str) -> int:
    """Where unquoted text that starts at `at` ends: at a stop outside of ${...} that no backslash precedes."""
    braces = 0
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        if text.startswith("${", at):
            braces += 1
            at += 2
            continue
        if braces and text[at] == "}":
            braces -= 1
        elif not braces and text[at] in stops:
            return at
        at += 1
    return len(text)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n":
        at += 1
    return at


def _primitive(text: str) -> Any:
    if text.lower() == "null":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) or _NOT_FINITE.fullmatch(text):
        return float(text)
    return text if "${" in text else _ESCAPED.sub(r"\1", text)


def format_value(value: Any) -> str:
    """The text that `parse_value` reads back as `value` (of null, bool, int, float, str, list, dict with text keys)."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_format_text(str(k))}:{format_value(v)}" for k, v in value.items()) + "}"
    return _format_text(str(value))


def _format_text(text: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_/.~][\w/.@%+-]*", text) and isinstance(_primitive(text), str)
    if plain:
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"
