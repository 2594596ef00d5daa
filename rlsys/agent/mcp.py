"""Tools of MCP servers: every call opens a session, which calls the tool and ends."""

import asyncio
import json
from collections.abc import Collection, Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlsys.agent.tools import BaseTool, Tool
from rlsys.telemetry.jsonl import JsonObject
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import ConfigError, raised_as

TARGET = f"{__name__}:MCPTool"
START_S = 60.0


class MCPTool(BaseTool):
    """A tool of a server; config: `server`, an entry of the file's `mcpServers`, and `tool`, its name there."""

    async def execute(self, instance_id: str, parameters: Mapping[str, object], **kwargs: object) -> str:
        async with _client(self.config["server"]) as client:
            result = await client.call_tool(self.config["tool"], dict(parameters))
        text = "\n".join(part.text if part.type == "text" else f"({part.type})" for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text


def tools_of_servers(path: str, selected: Collection[str] = (), *, key: str) -> list[Tool]:
    """The tools that the servers of a file with `mcpServers` offer; of those only `selected`, if any. ConfigError."""
    with raised_as(ConfigError, f"{key}: {path} is not a JSON file with mcpServers"):
        servers = json.loads(Path(path).read_text())["mcpServers"]
    if find_spec("mcp") is None:
        raise ConfigError(f"{key}: MCP servers need the package mcp: pip install -e '.[mcp]'")
    tools = []
    for name, server in servers.items():
        with raised_as(ConfigError, f"{key}: MCP server {name} of {path} does not list its tools"):
            offered = _offered(json.dumps(server))
        for tool in offered:
            schema = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            config = {"server": server, "tool": tool.name}
            tools.append(Tool(tool.name, {"type": "function", "function": schema}, TARGET, "execute", config=config))
    if missing := sorted(set(selected) - {tool.name for tool in tools}):
        raise ConfigError(f"{key}: no server of {path} has {', '.join(missing)}")
    return [tool for tool in tools if not selected or tool.name in selected]


@cache
def _offered(server: str) -> list[Any]:
    """The tools of a server (JSON), asked once, and in a thread of its own since a notebook runs an event loop."""

    async def ask() -> list[Any]:
        async with asyncio.timeout(START_S), _client(json.loads(server)) as client:
            return list((await client.list_tools()).tools)

    return in_daemon_thread(partial(asyncio.run, ask()), name="mcp").result()


def _client(server: JsonObject) -> Any:
    """A client of a server that `command` starts, or that listens at `url`."""
    from mcp import Client, StdioServerParameters, stdio_client

    if "url" in server:
        return Client(server["url"])
    return Client(stdio_client(StdioServerParameters.model_validate(server)))
