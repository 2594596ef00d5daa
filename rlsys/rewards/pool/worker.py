"""The grader's side of the reward pool: load a `compute_score`, answer items in turn or, if it is async, at once."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlsys.ipc.framing import FrameBuffer, receive
from rlsys.rewards.pool.framing import MAX_FRAME_BYTES, decode, encode, plain
from rlsys.utils.plugins import load_from_file

MAX_EXTRA_BYTES = 1 << 20

ComputeScore = Callable[..., Any]


def serve_and_exit(work: socket.socket) -> NoReturn:
    """Load the grader that the first message names, grade what comes until the pool closes, and end the process."""
    code = 1
    try:
        _serve(work, decode(receive(work, max_bytes=MAX_FRAME_BYTES)))
        code = 0
    except (BrokenPipeError, ConnectionResetError, EOFError):
        code = 0
    except (Exception, SystemExit, KeyboardInterrupt):
        traceback.print_exc()
    os._exit(code)


def _serve(work: socket.socket, first: Mapping[str, Any]) -> None:
    try:
        grade = load_grader(first["path"], first["name"])
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        work.sendall(encode({"event": "unusable", "message": describe(error)}))
        return
    concurrent = inspect.iscoroutinefunction(grade)
    work.sendall(encode({"event": "ready", "concurrent": concurrent}))
    if concurrent:
        asyncio.run(_serve_concurrently(work, grade, first["kwargs"], first["timeout_s"]))
    else:
        _serve_in_turn(work, grade, first["kwargs"])


def load_grader(path: str | None, name: str) -> ComputeScore:
    """The function `name` of the local file `path`, or the built-in router when there is no path."""
    if path is None:
        from rlsys.rewards.registry import compute_score, warm_up

        warm_up()
        return compute_score
    grade = load_from_file(path, name, key="custom_reward_function")
    if not callable(grade):
        raise TypeError(f"{name} is not a function")
    return grade


def _arguments(message: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    return {**{name: message[name] for name in names}, **kwargs}


def _serve_in_turn(work: socket.socket, grade: ComputeScore, kwargs: Mapping[str, Any]) -> None:
    while True:
        message = decode(receive(work, max_bytes=MAX_FRAME_BYTES))
        start = time.perf_counter()
        try:
            value = grade(**_arguments(message, kwargs))
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            answer = _scored(value)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            answer = _unscored(error)
        work.sendall(encode({"id": message["id"], "seconds": time.perf_counter() - start, **answer}))


async def _serve_concurrently(
    work: socket.socket, grade: ComputeScore, kwargs: Mapping[str, Any], timeout_s: float
) -> None:
    """Run every item that arrives as a task; before a task runs on, the pool is told whose turn it is."""
    work.setblocking(False)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    running = _Running(work)

    async def one(message: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        answer: dict[str, Any] = {"status": "timeout", "message": f"no score within {timeout_s:g} s"}
        try:
            task = asyncio.ensure_future(_Turns(grade(**_arguments(message, kwargs)), message["id"], running))
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            task.cancel()
            if done:
                answer = _scored(task.result())
        except Exception as error:
            answer = _unscored(error)
        running.write(encode({"id": message["id"], "seconds": time.perf_counter() - start, **answer}))

    buffer = FrameBuffer(max_bytes=MAX_FRAME_BYTES)
    while data := await loop.sock_recv(work, 1 << 20):
        for parts in buffer.feed(data):
            task = asyncio.ensure_future(one(decode(parts)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


class _Running:
    """Writes frames without interleaving and remembers whose turn was announced last."""

    def __init__(self, work: socket.socket) -> None:
        self._work, self._last = work, -1

    def announce(self, number: int) -> None:
        if number != self._last:
            self._last = number
            self.write(encode({"event": "turn", "id": number}))

    def write(self, frame: bytes) -> None:
        self._work.setblocking(True)
        self._work.sendall(frame)
        self._work.setblocking(False)


class _Turns(Coroutine[Any, Any, Any]):
    """A coroutine that announces its number each time it runs on, so that one that never yields can be named."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, running: _Running) -> None:
        self._inner, self._number, self._running = inner, number, running

    def send(self, value: Any, /) -> Any:
        self._running.announce(self._number)
        return self._run_on(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        self._running.announce(self._number)
        return self._run_on(self._inner.throw, *error)

    @staticmethod
    def _run_on(step: Callable[..., Any], *values: Any) -> Any:
        try:
            return step(*values)
        except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop and all its other tasks
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def describe(error: BaseException) -> str:
    """One line: type, text and the innermost line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:1000]}{where}"


def _unscored(error: BaseException) -> dict[str, Any]:
    """A grader that gives up in time by TimeoutError is late, not broken."""
    return {"status": "timeout" if isinstance(error, TimeoutError) else "error", "message": describe(error)}


def _scored(value: Any) -> dict[str, Any]:
    score, extra = read_score(value)
    if not math.isfinite(score):
        return {"status": "error", "message": f"the grader returned {score}"}
    if len(encode(extra)) > MAX_EXTRA_BYTES:
        return {"status": "error", "message": f"the grader returned more than {MAX_EXTRA_BYTES} bytes of extra values"}
    return {"status": "ok", "score": score, "extra": extra}


def read_score(value: Any) -> tuple[float, dict[str, Any]]:
    """Score and extra values of what a verl `compute_score` may return.

    A dict carries `score`, its other keys are extra; of a sequence the first counts; a plain number is also `acc`.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"the grader returned a dict without 'score': {sorted(map(str, value))[:10]}")
        extra = {str(k): plain(v) for k, v in value.items() if k != "score"}
        return _number(value["score"]), extra
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        value = value[0]
    score = _number(value)
    return score, {"acc": score}


def _number(value: Any) -> float:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bool | int | float):
        return float(value)
    raise TypeError(f"the grader returned {type(value).__name__} instead of a number")
