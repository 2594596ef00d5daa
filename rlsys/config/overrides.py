"""Dotted overrides in Hydra's forms: key=value, +key=value and ++key=value, which mean the same, and ~key (reset).

Values: null, true/false, numbers, text, 'quoted text', [lists], {dicts: of any}, and ${interpolations}, which stay text
for the loader. Text needs quotes if it holds a comma or starts with a bracket or a quote; a Jinja template needs none.
The grammar is Hydra's rather than YAML's flow style, which reads {a:1} as {"a:1": null}, yes as true, 007 as 7,
"C:\\new" with a line break, and cannot hold ${a}. Unlike in Hydra 1_000 is text, because 0.5_2 is two bounds in
algorithm.rollout_correction.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from rlsys.utils.errors import ConfigError, raised_as

T = TypeVar("T")

_OVERRIDE = re.compile(r"(\+\+?|~)?(.*)", re.DOTALL)
_KEY = re.compile(r"[\w@-]+(\.[\w-]+)*(@[\w.-]+)?")
_WORDS = {"null": None, "true": True, "false": False}
_INT = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)")
_NOT_FINITE = re.compile(r"[+-]?(inf|nan)", re.IGNORECASE)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_QUOTED = re.compile(r"""(['"])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
_SPACE = re.compile(r"[ \t\n]*")
_MAX_DEPTH = 50


@dataclass(frozen=True)
class Override:
    """One override: a key and its value, or with `removes` a key to reset."""

    key: str
    value: Any = None
    removes: bool = False
    text: str = ""


def parse_override(text: str) -> Override:
    """Parse one argument; ConfigError if it is not an override."""
    rest, equals, value = text.partition("=")
    op, key = _OVERRIDE.fullmatch(rest).groups()  # type: ignore[union-attr]
    if not equals and op != "~":
        raise ConfigError(f"'{text}' is neither an option nor an override; use key=value, e.g. trainer.total_epochs=1")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"'{text}': '{key}' is not a key; a key is names joined by dots, e.g. data.train_batch_size")
    if op == "~":
        if equals:
            raise ConfigError(f"'{text}': ~ resets a key, so it takes no value; use ~{key} or {key}={value}")
        return Override(key, removes=True, text=text)
    with raised_as(ConfigError, f"{key} = {value}", ValueError):
        return Override(key, parse_value(value), text=text)


def parse_value(text: str) -> object:
    """Parse a value; ValueError says what is wrong with it."""
    text = text.strip()
    values = _Parser(text)
    if text.startswith(("{{", "{%", "{#")):
        return text
    if text.startswith(("[", "{", "'", '"')):
        value = values.value()
        if rest := text[values.at :].strip():
            raise ValueError(f"'{rest}' is left over after {text[: values.at]}; put quotes around the whole text")
        return value
    first = values.unquoted(",")
    if values.at < len(text):
        raise ValueError(f"a comma needs a list, ['{first}', ...], or quotes around the text, key=\"{text}\"")
    return _primitive(text)


class _Parser:
    """Reads values from `text`; `at` is the current position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def value(self, depth: int = 0) -> Any:
        """The next value, inside `depth` brackets."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} nested brackets")
        if self._next() in ("'", '"'):
            return self._quoted()
        if self._take("["):
            return list(self._items("]", lambda: self.value(depth + 1)))
        if self._take("{"):
            return dict(self._items("}", lambda: (self._key(), self.value(depth + 1))))
        if word := self.unquoted(",]}").strip():
            return _primitive(word)
        raise ValueError(f"a value is missing in {self.text}")

    def unquoted(self, stops: str) -> str:
        """Text up to one of `stops` that is neither inside ${...} nor escaped by a backslash."""
        start, braces = self.at, 0
        while self.at < len(self.text):
            char, pair = self.text[self.at], self.text[self.at : self.at + 2]
            if not braces and char in stops:
                break
            braces += 1 if pair == "${" else -1 if braces and char == "}" else 0
            self.at += 2 if char == "\\" or pair == "${" else 1
        self.at = min(self.at, len(self.text))
        return self.text[start : self.at]

    def _items(self, close: str, read: Callable[[], T]) -> Iterator[T]:
        while not self._take(close):
            yield read()
            if self._take(","):
                if self._next() == close:
                    raise ValueError(f"a value is missing after the last comma of {self.text}")
            elif self._next() != close:
                raise ValueError(f"'{close}' is missing in {self.text}")

    def _key(self) -> str:
        key = self._quoted() if self._next() in ("'", '"') else self.unquoted(":,}]").strip()
        if not key or not self._take(":"):
            raise ValueError(f"a dict has the form {{name: value, ...}}, not {self.text}")
        return key

    def _quoted(self) -> str:
        """Quoted text, in which a backslash only escapes the quote, or backslashes in front of one."""
        if (match := _QUOTED.match(self.text, self.at)) is None:
            raise ValueError(f"the closing {self.text[self.at]} is missing in {self.text}")
        self.at = match.end()
        return re.sub(rf"\\+(?={match[1]}|\Z)", lambda slashes: "\\" * (len(slashes[0]) // 2), match[2])

    def _take(self, char: str) -> bool:
        """Whether `char` comes next, after spaces; it is consumed if so."""
        is_next = self._next() == char
        self.at += is_next
        return is_next

    def _next(self) -> str:
        """The next character after spaces, which are consumed; empty at the end."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        return self.text[self.at : self.at + 1]


def _primitive(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) or _NOT_FINITE.fullmatch(text):
        return float(text)
    return text if "${" in text else _ESCAPED.sub(r"\1", text)


def format_value(value: object) -> str:
    """The text that `parse_value` parses as `value` (null, bool, int, float, str, list, dict with str keys)."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_format_text(str(k))}:{format_value(v)}" for k, v in value.items()) + "}"
    return _format_text(str(value))


def _format_text(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_/.~][\w/.@%+-]*", text) and isinstance(_primitive(text), str):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"
