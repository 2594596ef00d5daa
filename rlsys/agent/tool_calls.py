"""Tool calls in the text of an answer, in the formats that models write; a malformed call carries its error.

Formats: hermes (also Qwen and SmolLM2), llama3, mistral, deepseek, json (objects or a fenced block), gpt-oss
(harmony), python (a fenced block is a call of the tool `python`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True)
class ToolCall:
    """A tool to call; with an `error` the model wrote something that cannot be called."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    error: str = ""


def parse_tool_calls(text: str, format: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in their order; `format` is one of PARSERS."""
    calls: list[ToolCall] = []
    kept, end = "", 0
    for start, stop, call in PARSERS[format](text):
        calls.append(call)
        kept, end = kept + text[end:start], stop
    return (kept + text[end:]).strip() if calls else text, calls


Parsed = Iterator[tuple[int, int, ToolCall]]


def _read(value: object) -> ToolCall:
    """A call from a decoded {name, arguments}; llama writes `parameters`, some models arguments as JSON text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", error='a tool call must be {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return _named(value["name"], arguments)
    if not isinstance(arguments, Mapping):
        return ToolCall(value["name"], error="the arguments of a tool call must be an object")
    return ToolCall(value["name"], arguments)


def _named(name: str, arguments: str) -> ToolCall:
    try:
        return _read({"name": name, "arguments": json.loads(arguments or "{}") or {}})
    except (ValueError, RecursionError) as error:
        return ToolCall(name, error=f"the arguments are not JSON: {error}")


def _loads(text: str) -> ToolCall:
    try:
        return _read(json.loads(text.strip()))
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the tool call is not JSON: {error}")


def _fenced(pattern: re.Pattern[str], read: Callable[..., ToolCall], text: str) -> Parsed:
    yield from ((match.start(), match.end(), read(*match.groups())) for match in pattern.finditer(text))


def _decoded(pattern: re.Pattern[str], text: str, *, always: bool = False) -> Parsed:
    """JSON behind a pattern: an object, a list of them, or the arguments of the function in the pattern's group.

    Unless it is `always` a call, objects without a name are text.
    """
    at = 0
    for match in pattern.finditer(text):
        if match.start() < at:
            continue
        name, rest = match[1], text[match.end() :]
        try:
            value, length = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            if always or '"name"' in rest:
                yield match.start(), len(text), ToolCall(name or "", error=f"the tool call is not JSON: {error}")
                return
            continue
        end = re.compile(r"(?:\s*(?:```|;))?").match(rest, length)
        at = match.end() + (end.end() if end else length)
        values = [{"name": name, "arguments": value}] if name else value if isinstance(value, list) else [value]
        for number, call in enumerate(values):
            if always or (isinstance(call, Mapping) and "name" in call):
                yield match.start() if number == 0 else at, at, _read(call)


# No part of a pattern is tried twice on the same white space: models that fall apart write a lot of it.
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_OBJECTS = re.compile(r'(?:(?:<\|python_tag\|>|```(?:json)?|(?<!\s))\s*+)?()(?=\{\s*+")')
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?:(\w+)(?:\[ARGS\])?)?\s*")
_DEEPSEEK = re.compile(
    r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<]+)"
    r"(?:\n```json\n|<｜tool▁sep｜>)(.*?)<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
    re.DOTALL,
)
_GPT_OSS = re.compile(
    r"(?:<\|start\|>assistant|(?<!\s))\s*+(?:<\|channel\|>\w+\s*+)?to=functions\.([\w.-]++)"
    r"\s*+(?:<\|channel\|>\w++)?[^<]*+(?:<\|constrain\|>\w+)?<\|message\|>(.*?)(?:<\|call\|>|\Z)",
    re.DOTALL,
)
_PYTHON = re.compile(r"```python[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
PARSERS: dict[str, Callable[[str], Parsed]] = {
    "hermes": partial(_fenced, _HERMES, _loads),
    "llama3": partial(_decoded, _OBJECTS),
    "json": partial(_decoded, _OBJECTS),
    "mistral": partial(_decoded, _MISTRAL, always=True),
    "deepseek": partial(_fenced, _DEEPSEEK, lambda name, code: _named(name, code.rstrip().removesuffix("\n```"))),
    "gpt-oss": partial(_fenced, _GPT_OSS, _named),
    "python": partial(_fenced, _PYTHON, lambda code: ToolCall("python", {"code": code})),
}
