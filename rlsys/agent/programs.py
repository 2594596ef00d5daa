"""Programs as agents: a command or a function that speaks OpenAI's chat completions, unchanged."""

import asyncio
import inspect
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from rlsys.agent.endpoint import Endpoint, OpenEpisode
from rlsys.agent.presets import Workflow
from rlsys.agent.session import Row, Score, Session
from rlsys.agent.tools import load_target
from rlsys.telemetry.jsonl import plain_json
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import ConfigError, raised_as
from rlsys.utils.plugins import named_arguments

TAIL_BYTES, END_S = 2000, 5.0


def _workflow(call: Callable[[Row, OpenEpisode], Awaitable[float | None]]) -> Workflow:
    """An episode of one run of a program; its reward is returned, posted to /reward, or the last answer's grade."""
    endpoint = Endpoint()

    async def run(row: Row, session: Session) -> float | Score:
        episode = await endpoint.open(session)
        reward = None
        try:
            reward = await call(row, episode)
        except (Exception, SystemExit):  # clients raise where a budget is used up
            if not session.end:
                raise
        finally:
            await endpoint.end(episode)
        reward = episode.reward if reward is None else reward
        return await session.grade(episode.last) if reward is None else reward

    return Workflow(run, close=endpoint.close)


def command_workflow(command: str) -> Workflow:
    """Runs a command for each episode, with OPENAI_BASE_URL, OPENAI_API_KEY and the row as JSON in RLSYS_ROW.

    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY name the same episode.
    """

    async def call(row: Row, episode: OpenEpisode) -> None:
        env = {**os.environ, "RLSYS_ROW": json.dumps(plain_json(row))}
        direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")  # as curl and Python's clients read them
        env |= dict.fromkeys(("no_proxy", "NO_PROXY"), f"{direct},127.0.0.1" if direct else "127.0.0.1")
        env |= {"OPENAI_BASE_URL": episode.base_url, "ANTHROPIC_BASE_URL": episode.base_url.removesuffix("/v1")}
        env |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), episode.key)
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_shell(
                command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
            )
            try:
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=END_S)
            if code != 0:
                output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
                raise RuntimeError(f"{command} exited with code {code}: {output.read().decode(errors='replace')}")

    return _workflow(call)


def function_workflow(path: str) -> Workflow:
    """Calls a function, sync or async, with those of row, data, prompt, base_url and api_key that it names."""
    key = "actor_rollout_ref.rollout.agent.path"
    names = ("row", "data", "prompt", "base_url", "api_key")
    function = load_target(path, key=key)
    with raised_as(ConfigError, f"{key}={path}, a function that may name {', '.join(names)}", TypeError):
        if inspect.isclass(function):
            raise TypeError("it is a class, which actor_rollout_ref.rollout.workflow takes")
        inspect.signature(function).bind(**named_arguments(function, dict.fromkeys(names)))

    async def call(row: Row, episode: OpenEpisode) -> float | None:
        given = {"row": row, "data": row, "prompt": row["prompt"], "base_url": episode.base_url, "api_key": episode.key}
        arguments = named_arguments(function, given)
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await asyncio.wrap_future(in_daemon_thread(partial(function, **arguments), name="agent"))

    return _workflow(call)
