"""The tool processes of a job: calls with a deadline in processes that are killed and replaced when they hang."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rlsys.agent.episode_log import EpisodeLog
from rlsys.agent.tool_process import CREATE, LOST
from rlsys.agent.tools import Tool
from rlsys.config.schema.rollout import AgentConfig, MultiTurnConfig
from rlsys.rewards.pool.messages import late
from rlsys.rewards.pool.pool import Grader, RewardItem, RewardPool, RewardResult, failed

log = logging.getLogger(__name__)
PROCESS = str(Path(__file__).with_name("tool_process.py"))


class ToolPool:
    """`num_workers` processes for functions, as many for async functions and for objects, each of which hosts many.

    They start when they are first needed, and import what the episodes may call before a call's time begins, at most
    `tool_timeout_s`; longer texts are cut.
    """

    def __init__(self, agent: AgentConfig, turns: MultiTurnConfig) -> None:
        self.num_workers, self._timeout_s = agent.num_workers, agent.tool_timeout_s
        self._cut = {"max_chars": turns.max_tool_response_length, "side": turns.tool_response_truncate_side}
        self._pools: dict[str, RewardPool] = {}
        self.functions, self.objects, self._warned = set[str](), set[str](), set[str]()
        self.object_numbers = count(1)

    async def call(self, item: RewardItem, host: str) -> RewardResult:
        """The pool's result of one call in the processes of a host: `functions`, `async` or one of the objects'."""
        if host not in self._pools:
            workers, targets = (1, self.objects) if host.startswith("objects") else (self.num_workers, self.functions)
            grader = Grader(PROCESS, "call_async" if host == "async" else "call", {"cut": self._cut}, targets)
            self._pools[host] = RewardPool(grader, num_workers=workers, timeout_s=self._timeout_s)
        (result,) = await asyncio.wrap_future(self._pools[host].submit([item]))
        message, name = result.message, ".".join(filter(None, (item.data_source.rpartition(":")[2], item.solution)))
        if message == late(self._timeout_s):
            message = f"{name}: no result within agent.tool_timeout_s={self._timeout_s:g} s"
        message = message.replace("the grader's process", "the tool's process")
        if result.status != "ok" and name not in self._warned:
            self._warned.add(name)
            log.warning("a call of %s failed: %s", name, message)
        return replace(result, message=message)

    def close(self) -> None:
        """End all processes."""
        while self._pools:  # an episode that still runs may add one
            self._pools.popitem()[1].close()


@dataclass
class ToolObject:
    """A user's object in a tool process, an instance of `target`; its calls are in `log` under `name`.

    When its process is replaced, or the log that had its calls ends, it is made again by repeating its calls.
    """

    pool: ToolPool
    number: int
    target: str
    config: Mapping[str, object]
    log: EpisodeLog
    name: str
    _calls: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    _is_made: bool = False
    _failed: RewardResult | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def call(self, method: str, arguments: Mapping[str, object] | None = None) -> RewardResult:
        """The pool's result of a call of `create` or a method."""
        if self._failed is not None:
            return self._failed
        arguments = arguments or {}
        request = {"tool": self.name, "method": method, "arguments": arguments}
        async with self._lock:  # calls that are repeated must not mix with others
            result = await self.log.result(request, partial(self._call, method, arguments), RewardResult)
            if result.status == "ok":
                self._calls.append((method, arguments))
            elif method == CREATE:
                self._failed = result
        return result

    async def _call(self, method: str, arguments: Mapping[str, object]) -> RewardResult:
        self._is_made = True
        for _ in range(3):  # another object's call may end the process again
            result = await self._send(method, arguments)
            if result.extra.get("status") != LOST:
                return result
            for earlier in self._calls:
                await self._send(*earlier)
        return failed("error", 0.0, f"the process of {self.name} ended in calls of others")

    async def _send(self, method: str, arguments: Mapping[str, object]) -> RewardResult:
        item = RewardItem(self.target, method, dict(arguments), {"object": str(self.number), "config": self.config})
        return await self.pool.call(item, f"objects-{self.number % self.pool.num_workers}")

    async def close(self) -> None:
        """Release the object, if there is one."""
        if self._is_made:
            await self._send("close", {})


class EpisodeTools:
    """The tools of one episode: functions, and objects that are made when they are first called.

    `tools_kwargs` are verl's: {tool: {create_kwargs: ...}}; `environment` is the class whose methods are tools of one
    object. A call whose result is in `log` is not made again.
    """

    def __init__(
        self,
        pool: ToolPool,
        tools: Sequence[Tool],
        *,
        environment: str | None = None,
        tools_kwargs: Mapping[str, Any] | None = None,
        log: EpisodeLog | None = None,
    ) -> None:
        self._pool, self._tools = pool, {tool.name: tool for tool in tools}
        self._kwargs, self._log = tools_kwargs or {}, log or EpisodeLog()
        pool.functions |= {tool.target for tool in tools if not tool.method}
        pool.objects |= {tool.target for tool in tools if tool.method}
        self._objects: dict[str, ToolObject] = {}
        self.environment = self.add_object(environment) if environment else None
        self._lock = asyncio.Lock()

    @property
    def schemas(self) -> list[Mapping[str, object]]:
        return [tool.schema for tool in self._tools.values()]

    def add_object(self, target: str, config: Mapping[str, object] | None = None, *, name: str = "") -> ToolObject:
        """An object of this class, which `create` makes and which is released with the episode."""
        number, name = next(self._pool.object_numbers), name or target
        self._pool.objects.add(target)
        self._objects[name] = made = ToolObject(self._pool, number, target, config or {}, self._log, name)
        return made

    async def call(self, name: str, arguments: Mapping[str, object]) -> RewardResult:
        """The result of one call, which `result_text` reads; its score is the reward that verl's tools return."""
        if (tool := self._tools.get(name)) is None:
            return failed("error", 0.0, f"there is no tool {name!r}; the tools are: {', '.join(self._tools) or 'none'}")
        if tool.method:
            return await (await self._object(tool)).call(tool.method, arguments)
        item = RewardItem(tool.target, "", dict(arguments), {})
        make = partial(self._pool.call, item, "async" if tool.is_async else "functions")
        return await self._log.result({"tool": name, "arguments": arguments}, make, RewardResult)

    async def _object(self, tool: Tool) -> ToolObject:
        """The environment, or verl's tool of this name."""
        async with self._lock:
            made = self._objects.get(tool.target if tool.config is None else tool.name)
            if made is None:
                config = {"config": dict(tool.config or {}), "tool_schema": dict(tool.schema)}
                made = self.add_object(tool.target, config, name=tool.name)
                await made.call(CREATE, (self._kwargs.get(tool.name) or {}).get("create_kwargs") or {})
            return made

    async def close(self) -> None:
        """Release the objects of this episode."""
        for made in self._objects.values():
            await made.close()


def result_text(result: RewardResult) -> str:
    """What the model reads of a call; errors and timeouts are texts too."""
    return result.extra["text"] if result.status == "ok" else f"Error: {result.message[:400]}"


def checked(result: RewardResult, what: str) -> RewardResult:
    """The result of a call that an episode cannot do without. RuntimeError if there is none."""
    if result.status != "ok":
        raise RuntimeError(f"{what} failed: {result.message}")
    return result
