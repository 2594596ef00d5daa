"""The tool processes of a job: calls with a deadline in processes that are killed and replaced when they hang."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlsys.agent.episode_log import EpisodeLog
from rlsys.agent.session import ToolResult
from rlsys.agent.tool_process import CREATE, LOST
from rlsys.agent.tools import Tool, check_names
from rlsys.rewards.pool.pool import Grader, RewardItem, RewardPool, RewardResult

PROCESS = str(Path(__file__).with_name("tool_process.py"))


class ToolPool:
    """`num_workers` processes for functions, as many for objects (each hosts many), and one for async functions.

    They start when they are first needed. A call takes at most `timeout_s`; texts longer than `max_chars` are cut.
    """

    def __init__(
        self, *, num_workers: int = 8, timeout_s: float = 30.0, max_chars: int = 4096, side: str = "middle"
    ) -> None:
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._cut = {"max_chars": max_chars, "side": side}
        self._pools: dict[str, RewardPool] = {}
        self._num_objects = 0

    async def call(
        self, target: str, method: str, arguments: Mapping[str, Any], *, is_async: bool = False, **extra: Any
    ) -> RewardResult:
        """The pool's result of one call; `extra` are the object's key, its host and its config."""
        host = extra.pop("host", "async" if is_async else "functions")
        if host not in self._pools:
            grader = Grader(PROCESS, "call_async" if is_async else "call", {"cut": self._cut})
            workers = self._num_workers if host == "functions" else 1
            self._pools[host] = RewardPool(grader, num_workers=workers, timeout_s=self._timeout_s)
        item = RewardItem(target, method, dict(arguments), extra)
        return (await asyncio.wrap_future(self._pools[host].submit([item])))[0]

    def new_object(
        self, target: str, config: Mapping[str, Any] | None = None, *, log: EpisodeLog | None = None, name: str = ""
    ) -> ToolObject:
        """A new object of a class; `create` makes it. Its calls are in `log` under `name`."""
        self._num_objects += 1
        host = f"objects-{self._num_objects % self._num_workers}"
        place = {"host": host, "object": str(self._num_objects), "config": dict(config or {})}
        return ToolObject(self, target, place, log or EpisodeLog(), name or target)

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@dataclass
class ToolObject:
    """A user's object in a tool process.

    When its process is replaced, or the log that had its calls ends, it is made again by repeating its calls.
    """

    pool: ToolPool
    target: str
    place: Mapping[str, Any]
    log: EpisodeLog
    name: str
    _calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    _is_made: bool = False

    async def call(self, method: str, arguments: Mapping[str, Any] | None = None) -> RewardResult:
        """The pool's result of a call of `create` or a method."""
        arguments = arguments or {}
        request = {"tool": self.name, "method": method, "arguments": arguments}
        result = await self.log.result(request, partial(self._call, method, arguments), RewardResult)
        if result.status == "ok":
            self._calls.append((method, arguments))
        return result

    async def _call(self, method: str, arguments: Mapping[str, Any]) -> RewardResult:
        self._is_made = True
        result = await self.pool.call(self.target, method, arguments, **self.place)
        if result.extra.get("status") == LOST:
            for earlier in self._calls:
                await self.pool.call(self.target, *earlier, **self.place)
            result = await self.pool.call(self.target, method, arguments, **self.place)
        return result

    async def close(self) -> None:
        """Release the object, if there is one."""
        if self._is_made:
            await self.pool.call(self.target, "close", {}, **self.place)


class EpisodeTools:
    """The tools of one episode: functions, and objects that are made when they are first called.

    `tools_kwargs` are verl's: {tool: {create_kwargs: ...}}; `environment` is the object that methods belong to. A call
    whose result is in `log` is not made again.
    """

    def __init__(
        self,
        pool: ToolPool,
        tools: Sequence[Tool],
        *,
        environment: ToolObject | None = None,
        tools_kwargs: Mapping[str, Any] | None = None,
        log: EpisodeLog | None = None,
    ) -> None:
        check_names(tools)
        self._pool, self._tools, self.environment = pool, {tool.name: tool for tool in tools}, environment
        self._kwargs, self._log = tools_kwargs or {}, log or EpisodeLog()
        self._objects: dict[str, ToolObject] = {}
        self._lock = asyncio.Lock()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The result of one call; an error or a timeout is a text that the model can read."""
        tool = self._tools.get(name)
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return ToolResult(f"Error: there is no tool {name!r}; the tools are: {names}", "error")
        if not tool.method:
            make = partial(self._pool.call, tool.target, "", arguments, is_async=tool.is_async)
            result = await self._log.result({"tool": name, "arguments": arguments}, make, RewardResult)
        elif self.environment is not None and self.environment.target == tool.target:
            result = await self.environment.call(tool.method, arguments)
        else:
            result = await (await self._object(tool)).call(tool.method, arguments)
        return _tool_result(result)

    async def _object(self, tool: Tool) -> ToolObject:
        async with self._lock:
            if tool.name not in self._objects:
                config = {"config": dict(tool.config), "tool_schema": dict(tool.schema)}
                made = self._pool.new_object(tool.target, config, log=self._log, name=tool.name)
                kwargs = (self._kwargs.get(tool.name) or {}).get("create_kwargs") or {}
                await made.call(CREATE, kwargs)
                self._objects[tool.name] = made
            return self._objects[tool.name]

    async def close(self) -> None:
        """Release the objects of this episode."""
        for made in [*self._objects.values(), *([self.environment] if self.environment else [])]:
            await made.close()


def _tool_result(result: RewardResult) -> ToolResult:
    if result.status != "ok":
        return ToolResult(f"Error: {result.message[:400]}", result.status, result.seconds)
    extra = result.extra
    return ToolResult(extra["text"], "ok", result.seconds, result.score, extra["metrics"])
