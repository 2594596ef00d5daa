"""Tools: typed functions, classes whose public methods are tools, and verl's BaseTool; all run in the tool processes.

A schema comes from type hints and docstring, as transformers writes them. Importing this module loads neither torch nor
transformers, as tool processes import it with the user's code.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from rlsys.telemetry.jsonl import JsonObject
from rlsys.utils.errors import ConfigError, raised_as
from rlsys.utils.plugins import load_from_file

F = TypeVar("F", bound=Callable[..., object])
RESERVED = ("reset", "get_reward", "close")


@dataclass(frozen=True)
class Tool:
    """A tool as the model sees it (`schema`) and where its code is.

    `target` is module:name or file.py:name of a function, or of the class that `method` belongs to. `config` are the
    arguments of a BaseTool.
    """

    name: str
    schema: JsonObject
    target: str
    method: str = ""
    is_async: bool = False
    config: JsonObject | None = None


class BaseTool:
    """verl's interface of tools with state: one `create` for an episode, `execute` for each call, then `release`."""

    def __init__(self, config: JsonObject, tool_schema: JsonObject | None = None) -> None:
        self.config, self.tool_schema = config, tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: object) -> Any:
        return instance_id

    async def execute(self, instance_id: str, parameters: Mapping[str, Any], **kwargs: object) -> object:
        """(text, reward, metrics) of one call."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        return None


def function_tool(name: str | None = None, schema: JsonObject | None = None) -> Callable[[F], F]:
    """Mark a function as a tool; name and OpenAI schema are those of its docstring unless they are given."""

    def mark(function: F) -> F:
        function.__dict__["function_tool"] = (name, schema)
        return function

    return mark


def tool_of(function: Callable[..., object] | str) -> Tool:
    """A function, or module:name of one, as a tool. ConfigError if hints or docstring give no schema."""
    function = load_target(function, key="tools") if isinstance(function, str) else function
    name, schema = getattr(function, "function_tool", (None, None))
    schema = schema or schema_of(function)
    if name is not None:
        schema = {**schema, "function": {**schema["function"], "name": name}}
    return Tool(schema["function"]["name"], schema, target_of(function), is_async=inspect.iscoroutinefunction(function))


def tools_of_class(cls: type) -> list[Tool]:
    """The public methods of an environment class as tools, in the order of their definition."""
    methods = {n: m for base in reversed(cls.__mro__[:-1]) for n, m in vars(base).items() if inspect.isfunction(m)}
    return [
        Tool(name, schema_of(method), target_of(cls), name)
        for name, method in methods.items()
        if not name.startswith("_") and name not in RESERVED
    ]


def tools_of_file(path: str, *, key: str) -> list[Tool]:
    """The functions of a Python file that are marked with `function_tool`."""
    names = load_from_file(path, "__dict__", key=key)
    if not (tools := [tool_of(value) for value in names.values() if hasattr(value, "function_tool")]):
        raise ConfigError(f"{key}={path}: no function in it is marked with @function_tool()")
    return tools


def schema_of(function: Callable[..., object]) -> dict[str, Any]:
    """The OpenAI schema of a function by its type hints and Google docstring."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    fix = f"tool {function.__qualname__}: give it type hints and a docstring with Args"
    with raised_as(ConfigError, fix, DocstringParsingException, TypeHintParsingException):
        return get_json_schema(function)


def target_of(thing: Callable[..., object]) -> str:
    """Where a process finds a function or class: file.py:name for one of a file or script, else module:name."""
    if "<" in thing.__qualname__:
        raise ConfigError(f"tool {thing.__qualname__}: define it at the top level of a module, where processes find it")
    module = thing.__module__
    if module == "__main__" or module.startswith("rlsys_plugin_"):
        module = str(Path(inspect.getfile(thing)).resolve())
    return f"{module}:{thing.__qualname__}"


def load_target(target: str, *, key: str) -> Any:
    """What module:name or file.py:name (or module.name) stands for. ConfigError naming `key`."""
    module, _, name = target.rpartition(":") if ":" in target else target.rpartition(".")
    if not module or name == "py":
        raise ConfigError(f"{key}={target}: set module:name or file.py:name")
    if module.endswith(".py"):
        return load_from_file(module, name, key=key)
    with raised_as(ConfigError, f"{key}={target} cannot be loaded"):
        return resolve_name(f"{module}:{name}")


def as_text(result: object, max_chars: int, side: str = "middle") -> str:
    """What a tool returned as text of at most `max_chars`; of a longer one verl's `side` says what is left out."""
    text = result[: 4 * max_chars].decode(errors="replace") if isinstance(result, bytes) else result
    if not isinstance(text, str):
        text = json.dumps(result, default=str, ensure_ascii=False)
    if len(text) <= max_chars:
        return text
    head = {"left": max_chars, "right": 0}.get(side, max_chars // 2)
    return f"{text[:head]}...(truncated)...{text[len(text) - (max_chars - head) :]}"
