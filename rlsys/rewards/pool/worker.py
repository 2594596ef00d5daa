"""The worker process of the reward pool: load a `compute_score`, grade items in turn or, if it is async, at once."""

from __future__ import annotations

import inspect
import json
import math
import os
import socket
import time
import traceback
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rlsys.ipc.framing import FrameBuffer, receive
from rlsys.rewards.pool.messages import (
    MAX_FRAME_BYTES,
    GradeItem,
    GraderReady,
    GraderUnusable,
    ItemGraded,
    LoadGrader,
    pack,
    plain,
    unpack,
)
from rlsys.utils.plugins import load_from_file

MAX_EXTRA_BYTES = 1 << 20

ComputeScore = Callable[..., Any]


def serve_and_exit(work: socket.socket) -> NoReturn:
    """Load the grader that the first message names, grade items until the pool closes, and end the process."""
    code = 1
    try:
        _serve(work, unpack(receive(work, max_bytes=MAX_FRAME_BYTES), LoadGrader))
        code = 0
    except (BrokenPipeError, ConnectionResetError, EOFError):
        code = 0
    except (Exception, SystemExit, KeyboardInterrupt):
        traceback.print_exc()
    os._exit(code)


def _serve(work: socket.socket, grader: LoadGrader) -> None:
    try:
        grade = load_grader(grader.path, grader.name, grader.kwargs)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        work.sendall(pack(GraderUnusable(describe(error.__cause__ or error))))
        return
    is_async = inspect.iscoroutinefunction(grade)
    work.sendall(pack(GraderReady(is_async)))
    if is_async:
        import asyncio

        asyncio.run(_serve_async(work, grade, grader))
    else:
        _serve_in_turn(work, grade, grader.kwargs)


def load_grader(path: str | None, name: str, kwargs: Mapping[str, Any]) -> ComputeScore:
    """The function `name` of the local file `path`, or the built-in router when there is no path.

    TypeError for what is not a function or cannot be called with verl's arguments and `kwargs`.
    """
    if path is None:
        from rlsys.rewards.registry import compute_score, warm_up

        warm_up()
        return compute_score
    grade = load_from_file(path, name, key="custom_reward_function")
    if not callable(grade) or inspect.isclass(grade):
        raise TypeError(f"{name} is not a function")
    try:
        inspect.signature(grade).bind(data_source="", solution_str="", ground_truth=None, extra_info=None, **kwargs)
    except TypeError as error:
        given = ", ".join(("data_source", "solution_str", "ground_truth", "extra_info", *kwargs))
        raise TypeError(f"{name}{inspect.signature(grade)} is called with {given}: {error}") from None
    return grade


def _arguments(item: GradeItem, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = msgspec.structs.asdict(item)
    del arguments["id"]
    return {**arguments, **kwargs}


def grade_item(grade: ComputeScore, item: GradeItem, kwargs: Mapping[str, Any]) -> ItemGraded:
    """Grade one item now; what the grader raises is an error, or a timeout if it is a TimeoutError."""
    start_s = time.perf_counter()
    try:
        value = grade(**_arguments(item, kwargs))
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
        graded = _scored(item.id, value)
    except BdbQuit:
        raise
    except (Exception, SystemExit) as error:
        graded = _unscored(item.id, error)
    graded.seconds = time.perf_counter() - start_s
    return graded


def _serve_in_turn(work: socket.socket, grade: ComputeScore, kwargs: Mapping[str, Any]) -> None:
    while True:
        item = unpack(receive(work, max_bytes=MAX_FRAME_BYTES), GradeItem)
        try:
            graded = grade_item(grade, item, kwargs)
        except BdbQuit:
            graded = _unscored(item.id, RuntimeError("breakpoint() needs reward.num_workers=0 trainer.backend=local"))
        except KeyboardInterrupt as error:
            graded = _unscored(item.id, error)
        work.sendall(pack(graded))


async def _serve_async(work: socket.socket, grade: ComputeScore, grader: LoadGrader) -> None:
    """Grade every item that arrives in its own task, each for at most `timeout_s` seconds."""
    import asyncio

    work.setblocking(False)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(item: GradeItem) -> None:
        graded = await _grade_async(item, grade, grader)
        work.setblocking(True)  # so that frames do not interleave
        work.sendall(pack(graded))
        work.setblocking(False)

    buffer = FrameBuffer(max_bytes=MAX_FRAME_BYTES)
    while data := await loop.sock_recv(work, 1 << 20):
        for parts in buffer.feed(data):
            task = asyncio.ensure_future(answer(unpack(parts, GradeItem)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


async def _grade_async(item: GradeItem, grade: ComputeScore, grader: LoadGrader) -> ItemGraded:
    import asyncio

    start_s = time.perf_counter()
    graded = ItemGraded(item.id, "timeout", message=f"no score within {grader.timeout_s:g} s")
    try:
        task = asyncio.ensure_future(_without_exit(grade(**_arguments(item, grader.kwargs))))
        done, _ = await asyncio.wait({task}, timeout=grader.timeout_s)
        task.cancel()
        if done:
            graded = _scored(item.id, task.result())
    except Exception as error:
        graded = _unscored(item.id, error)
    graded.seconds = time.perf_counter() - start_s
    return graded


async def _without_exit(score: Awaitable[Any]) -> Any:
    try:
        return await score
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop and all its other tasks
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def describe(error: BaseException) -> str:
    """One line: type, text and the innermost line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:1000]}{where}"


def _unscored(number: int, error: BaseException) -> ItemGraded:
    """A grader that stops in time with a TimeoutError is late, not broken."""
    return ItemGraded(number, "timeout" if isinstance(error, TimeoutError) else "error", message=describe(error))


def _scored(number: int, value: Any) -> ItemGraded:
    score, extra = read_score(value)
    if not math.isfinite(score):
        return ItemGraded(number, "error", message=f"the grader returned {score}")
    if len(json.dumps(extra)) > MAX_EXTRA_BYTES:
        message = f"the grader returned more than {MAX_EXTRA_BYTES} bytes of extra values"
        return ItemGraded(number, "error", message=message)
    return ItemGraded(number, "ok", score=score, extra=extra)


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
