"""HTTP with limits: every wait has a deadline, every answer a size, and nothing is followed, unpacked or trusted."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

MAX_TEXT_CHARS = 300
MAX_ANSWER_BYTES = 64 << 20
MAX_WAIT_S = 60.0
EVENT = b"data:"


@dataclass(frozen=True)
class Call:
    """One request to a server: a route and its JSON body. An `optional` route may be missing on the server."""

    path: str
    body: Mapping[str, Any] | None = None
    method: str = "POST"
    optional: bool = False


class ServerFault(RuntimeError):
    """A server failed at something that another one, or the same one later, may do."""

    def __init__(self, url: str, stage: str, cause: str, *, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(f"{url} at stage '{stage}': {cause}")
        self.wait_s, self.status = wait_s, status


class StaleWeightsFault(ServerFault):
    """A server's tokens are of other weights than those that it was given last."""


class RefusedError(ValueError):
    """The server says that the request itself is wrong."""


async def open_session(token: str) -> aiohttp.ClientSession:
    """A session that sends the token, accepts no compression, keeps no cookies and reads no proxy settings."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    jar, connector = aiohttp.DummyCookieJar(), aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(headers=headers, auto_decompress=False, cookie_jar=jar, connector=connector)


async def ask(session: aiohttp.ClientSession, url: str, call: Call, *, stage: str, deadline_s: float) -> object:
    """The JSON a call answers, None for an empty or non-JSON answer; ServerFault or RefusedError."""
    async with _answer(session, url, call, stage=stage, timeout=aiohttp.ClientTimeout(total=deadline_s)) as response:
        data = await response.content.read(MAX_ANSWER_BYTES + 1)
        while len(data) <= MAX_ANSWER_BYTES and (more := await response.content.read(MAX_ANSWER_BYTES)):
            data += more
    if len(data) > MAX_ANSWER_BYTES:
        raise ServerFault(url, stage, f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    try:
        return json.loads(data) if data.lstrip()[:1] in (b"{", b"[") else None
    except ValueError as error:
        raise ServerFault(url, stage, f"invalid JSON: {error}") from error


async def events(
    session: aiohttp.ClientSession, url: str, call: Call, *, stage: str, timeout: aiohttp.ClientTimeout, max_bytes: int
) -> AsyncGenerator[dict[str, object], None]:
    """The JSON objects of a server-sent event stream up to its end mark.

    ServerFault where it ends without one, and for an event of more than `max_bytes`.
    """
    async with _answer(session, url, call, stage=stage, timeout=timeout) as response:
        rest = b""
        async for part in response.content.iter_any():
            *lines, rest = (rest + part).split(b"\n")
            if max(map(len, (*lines, rest))) > max_bytes:
                raise ServerFault(url, stage, f"an event of more than {max_bytes} bytes")
            for line in lines:
                text = line.strip()
                if not text.startswith(EVENT):
                    continue
                text = text.removeprefix(EVENT).strip()
                if text == b"[DONE]":
                    return
                yield _event(text, url, stage)
    raise ServerFault(url, stage, "the stream ended in the middle of an answer")


def _event(text: bytes, url: str, stage: str) -> dict[str, object]:
    try:
        event = json.loads(text)
    except ValueError as error:
        raise ServerFault(url, stage, f"invalid JSON in the stream: {error}") from error
    if not isinstance(event, dict):
        raise ServerFault(url, stage, "an event that is not a JSON object")
    if error := event.get("error"):
        details = error if isinstance(error, dict) else {"message": error}
        text_of, code = _short(details.get("message", "")), details.get("code")
        if isinstance(code, int) and 400 <= code < 500 and code not in (408, 429):
            raise RefusedError(f"{url} at stage '{stage}': {text_of}")
        raise ServerFault(url, stage, f"error in the stream: {text_of}")
    return event


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, url: str, call: Call, *, stage: str, timeout: aiohttp.ClientTimeout
) -> AsyncGenerator[aiohttp.ClientResponse, None]:
    """The response to a call whose status is 200; everything else, inside the block too, is raised as a fault."""
    response: aiohttp.ClientResponse | None = None
    request = session.request(call.method, url + call.path, json=call.body, timeout=timeout, allow_redirects=False)
    try:
        async with request as response:
            if response.status != 200:
                raise await _refusal(response, url, stage)
            yield response
    except Exception as error:
        if response is not None and not isinstance(error, aiohttp.ClientError | TimeoutError | OSError):
            raise
        if isinstance(error, TimeoutError):
            allowed = f"{timeout.total:g} s" if timeout.total else "its time"
            if timeout.sock_read is not None:
                allowed += f" (or {timeout.sock_read:g} s of silence)"
            raise ServerFault(url, stage, f"no answer within {allowed}") from error
        cause = f"{type(error).__name__}: {error}" if isinstance(error, aiohttp.ClientError | OSError) else repr(error)
        raise ServerFault(url, stage, cause) from error


async def _refusal(response: aiohttp.ClientResponse, url: str, stage: str) -> Exception:
    """The error for a status other than 200."""
    try:
        text = (await response.content.read(4096)).decode(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        text = str(error)
    response.close()
    status, wait = response.status, response.headers.get("Retry-After", "")
    say = f"HTTP {status}: {_short(text)} ({response.url.path})"
    if status in (400, 403, 413, 422):
        return RefusedError(f"{url} at stage '{stage}': {say}")
    if status in (429, 503):
        wait_s = min(float(wait), MAX_WAIT_S) if wait.isdecimal() else 0.0
        return ServerFault(url, stage, say, wait_s=wait_s, status=status)
    if 300 <= status < 400:
        say = f"HTTP {status}: redirects are not followed; name the server itself"
    if status == 401:
        say = f"HTTP {status}: the token is missing or wrong; it is read from the variable rollout.servers.token_env"
    return ServerFault(url, stage, say, status=status)


def _short(text: object) -> str:
    """The beginning of a server's text, on one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= MAX_TEXT_CHARS else line[:MAX_TEXT_CHARS] + " ..."
