"""Programs run by a SandboxFusion server (bytedance.github.io/SandboxFusion, POST /run_code)."""

import asyncio
from collections.abc import Sequence
from typing import Literal

import aiohttp
import msgspec
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

from rlsys.rewards.sandbox.run import SandboxError, SandboxLimits, SandboxRun

ANSWER_S = 10.0
"""What the server may take in addition to the limits of compiling and running."""
BUSY = (429, 502, 503, 504)


class CommandResult(msgspec.Struct):
    """How the program ended on the server."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(msgspec.Struct):
    """The server's answer; SandboxError means that it could not run the program."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: CommandResult | None = None


def run_remotely(
    url: str, programs: Sequence[tuple[str, str]], limits: SandboxLimits, *, max_concurrent: int
) -> list[SandboxRun]:
    """Run Python programs, each with its standard input, at most `max_concurrent` at a time.

    A busy server and a lost connection are tried again. SandboxError where a program could not be run.
    """

    async def run_all() -> list[SandboxRun]:
        timeout = aiohttp.ClientTimeout(total=2 * limits.wall_s + ANSWER_S)
        connector = aiohttp.TCPConnector(limit=max_concurrent)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, raise_for_status=True) as session:
            return await asyncio.gather(*(_run(session, url, *program, limits) for program in programs))

    try:
        return asyncio.run(run_all())
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise SandboxError(f"the sandbox at {url} ran no program: {type(error).__name__} {error}") from error


def _may_pass(error: BaseException) -> bool:
    is_busy = isinstance(error, aiohttp.ClientResponseError) and error.status in BUSY
    return is_busy or isinstance(error, aiohttp.ClientConnectionError)


@retry(
    retry=retry_if_exception(_may_pass),
    stop=stop_after_attempt(3),
    wait=wait_random_exponential(multiplier=0.5, max=4.0),
    reraise=True,
)
async def _run(session: aiohttp.ClientSession, url: str, code: str, stdin: str, limits: SandboxLimits) -> SandboxRun:
    seconds = {"compile_timeout": limits.wall_s, "run_timeout": limits.wall_s}
    program = {"language": "python", "code": code, "stdin": stdin, "memory_limit_MB": limits.memory_bytes >> 20}
    async with session.post(url, json=program | seconds) as response:
        answer = msgspec.json.decode(await response.read(), type=RunCodeAnswer)
    if answer.status == "SandboxError" or (result := answer.run_result) is None:
        raise SandboxError(f"the sandbox at {url} could not run the program: {answer.message[:200]}")
    stdout, stderr = result.stdout or "", result.stderr or ""
    if result.status == "TimeLimitExceeded":
        return SandboxRun("time limit", stdout, stderr)
    return SandboxRun("exit" if answer.status == "Success" else "failed", stdout, stderr)
