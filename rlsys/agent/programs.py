"""Programs as agents: a command or a function that speaks OpenAI's chat completions, unchanged."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rlsys.agent.endpoint import Endpoint, OpenEpisode
from rlsys.agent.session import Score, Session
from rlsys.agent.tools import load_target
from rlsys.telemetry.jsonl import plain_json

TAIL_BYTES = 2000
MAX_THREADS = 1024


class _Program:
    """An episode of one run of a program; its reward is returned, posted to /reward, or the last answer's grade."""

    def __init__(self) -> None:
        self._endpoint: Endpoint | None = None

    async def run(self, row: Mapping[str, Any], session: Session) -> float | Score | None:
        self._endpoint = self._endpoint or Endpoint()
        episode = await self._endpoint.open(session)
        try:
            reward = await self._call(row, episode)
        finally:
            self._endpoint.end(episode)
        reward = episode.reward if reward is None else reward
        if reward is not None or episode.last is None:
            return reward
        return await session.grade(episode.last)

    async def close(self) -> None:
        """Stop the server."""
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _call(self, row: Mapping[str, Any], episode: OpenEpisode) -> float | None:
        raise NotImplementedError


class CommandWorkflow(_Program):
    """Runs a command for each episode, with OPENAI_BASE_URL, OPENAI_API_KEY and the row as JSON in RLSYS_ROW.

    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY name the same episode.
    """

    def __init__(self, command: str) -> None:
        super().__init__()
        self.command = command

    async def _call(self, row: Mapping[str, Any], episode: OpenEpisode) -> None:
        environment = {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": episode.key, "NO_PROXY": "127.0.0.1"}
        environment["ANTHROPIC_BASE_URL"] = episode.base_url.removesuffix("/v1")
        environment["ANTHROPIC_API_KEY"] = episode.key
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_shell(
                self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment, "RLSYS_ROW": json.dumps(plain_json(row))},
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if code != 0:
                output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
                raise RuntimeError(f"{self.command} exited with code {code}: {output.read().decode(errors='replace')}")


class FunctionWorkflow(_Program):
    """Calls a function, sync or async, with those of row, data, prompt, base_url and api_key that it names."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._function = load_target(path, key="actor_rollout_ref.rollout.agent.path")
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="agent")

    async def _call(self, row: Mapping[str, Any], episode: OpenEpisode) -> float | None:
        given = {"row": row, "data": row, "prompt": row["prompt"], "base_url": episode.base_url, "api_key": episode.key}
        parameters = inspect.signature(self._function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        arguments = {name: value for name, value in given.items() if takes_all or name in parameters}
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        call = functools.partial(self._function, **arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
