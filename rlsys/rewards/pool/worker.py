"""The worker process of the reward pool: load a `compute_score`, grade items in turn or, if it is async, at once."""

import inspect
import json
import os
import time
import traceback
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from rlsys.rewards.pool import messages
from rlsys.rewards.pool.messages import RewardItem, RewardResult, failed
from rlsys.telemetry.jsonl import plain
from rlsys.types import is_reward
from rlsys.utils.plugins import load_from_file

OF_JUDGE = ("reward_router_address", "reward_model_tokenizer")
MAX_EXTRA_BYTES = 1 << 20

ComputeScore = Callable[..., Any]


def serve_and_exit(requests: BinaryIO, answers: BinaryIO) -> NoReturn:
    """Load the grader that the first message names, grade items until the pool closes, and end the process.

    `requests` and `answers` are pipes; the second message comes when the first is answered.
    """
    try:
        with suppress(BrokenPipeError):
            if line := requests.readline():
                _serve(requests, answers, messages.unpack(line, messages.LoadGrader))
        os._exit(0)
    except (Exception, SystemExit, KeyboardInterrupt):
        with suppress(OSError):  # a grader may have closed stderr
            traceback.print_exc()
        os._exit(1)


def _serve(requests: BinaryIO, answers: BinaryIO, load: messages.LoadGrader) -> None:
    try:
        grade = load_grader(load.grader)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        _send(answers, messages.GraderLoaded(problem=describe(error.__cause__ or error)))
        return
    is_async = inspect.iscoroutinefunction(grade)
    _send(answers, messages.GraderLoaded(is_async))
    if is_async:
        import asyncio

        asyncio.run(_serve_async(requests, answers, grade, load.timeout_s))
    else:
        _serve_in_turn(requests, answers, grade)


def _send(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(messages.pack(message))
    answers.flush()


def load_grader(grader: messages.Grader) -> ComputeScore:
    """The function that a grader names, or the built-in router when it has no path, with its `kwargs`.

    TypeError for what is not a function or cannot be called with verl's arguments and `kwargs`.
    """
    kwargs = grader.kwargs
    if grader.path is None:
        from rlsys.rewards.registry import compute_score

        compute_score("text/number", "1.0", "1")  # imports what takes long, so that no item is charged for it
        return partial(compute_score, **kwargs)
    grade = load_from_file(grader.path, grader.name, key="custom_reward_function.path")
    for target in sorted(grader.targets or ()):
        with suppress(Exception):  # its calls raise it again
            load_from_file(grader.path, "loaded", key=target)(target)
    kwargs = _of_judge(grade, kwargs)
    if not callable(grade) or inspect.isclass(grade):
        raise TypeError(f"{grader.name} is not a function")
    if "data_sources" in inspect.signature(grade).parameters:
        return partial(_one_row, grade, **kwargs)
    try:
        inspect.signature(grade).bind(data_source="", solution_str="", ground_truth=None, extra_info=None, **kwargs)
    except TypeError as error:
        given = ", ".join(("data_source", "solution_str", "ground_truth", "extra_info", *kwargs))
        raise TypeError(f"{grader.name}{inspect.signature(grade)} is called with {given}: {error}") from None
    return partial(grade, **kwargs)


def _of_judge(grade: object, kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """The arguments about a judge that a function takes; of its tokenizer, whose path came, the tokenizer itself."""
    if "reward_model_tokenizer" not in kwargs or not callable(grade):
        return kwargs
    takes = inspect.signature(grade).parameters
    kwargs = {name: value for name, value in kwargs.items() if name in takes or name not in OF_JUDGE}
    if "reward_model_tokenizer" in kwargs:
        from transformers import AutoTokenizer

        kwargs["reward_model_tokenizer"] = AutoTokenizer.from_pretrained(kwargs["reward_model_tokenizer"])
    return kwargs


def _one_row(
    grade: ComputeScore, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: object, **kwargs: object
) -> object:
    """Call a function written for verl's `batch` manager, which takes lists, for one row."""
    rows = {"data_sources": data_source, "solution_strs": solution_str, "ground_truths": ground_truth}
    return grade(**{key: [value] for key, value in rows.items()}, extra_infos=[extra_info], **kwargs)[0]


def _call(grade: ComputeScore, item: RewardItem) -> Any:
    arguments = {"data_source": item.data_source, "solution_str": item.solution, "ground_truth": item.ground_truth}
    return grade(**arguments, extra_info=item.extra_info)


def grade_item(grade: ComputeScore, item: RewardItem) -> RewardResult:
    """Grade one item now; what the grader raises is an error, or a timeout if it is a TimeoutError."""
    start_s = time.perf_counter()
    try:
        value = _call(grade, item)
        if inspect.iscoroutine(value):
            import asyncio

            from rlsys.utils.daemon_threads import in_daemon_thread

            run, in_loop = partial(asyncio.run, value), asyncio._get_running_loop() is not None  # as in a notebook
            value = in_daemon_thread(run, name="grader").result() if in_loop else run()
        result = _scored(value)
    except BdbQuit:
        raise
    except (Exception, SystemExit) as error:
        result = _unscored(error)
    return replace(result, seconds=time.perf_counter() - start_s)


def _serve_in_turn(requests: BinaryIO, answers: BinaryIO, grade: ComputeScore) -> None:
    for line in requests:
        request = messages.unpack(line, messages.GradeItem)
        try:
            result = grade_item(grade, request.item)
        except BdbQuit:
            result = _unscored(RuntimeError("breakpoint() needs reward.num_workers=0 trainer.backend=local"))
        except KeyboardInterrupt as error:
            result = _unscored(error)
        _send(answers, messages.ItemGraded(request.id, result))


async def _serve_async(requests: BinaryIO, answers: BinaryIO, grade: ComputeScore, timeout_s: float) -> None:
    """Grade every item that arrives in its own task, each for at most `timeout_s` seconds."""
    import asyncio

    lines = asyncio.StreamReader(limit=messages.MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), requests)

    async def answer(request: messages.GradeItem) -> None:
        _send(answers, messages.ItemGraded(request.id, await _grade_async(request.item, grade, timeout_s)))

    async with asyncio.TaskGroup() as tasks:
        while line := await lines.readline():
            tasks.create_task(answer(messages.unpack(line, messages.GradeItem)))


async def _grade_async(item: RewardItem, grade: ComputeScore, timeout_s: float) -> RewardResult:
    import asyncio

    start_s = time.perf_counter()
    result = failed("timeout", 0.0, messages.late(timeout_s))
    try:
        task = asyncio.ensure_future(_without_exit(_call(grade, item)))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        task.cancel()
        if done:
            result = _scored(task.result())
    except Exception as error:
        result = _unscored(error)
    return replace(result, seconds=time.perf_counter() - start_s)


async def _without_exit(score: Awaitable[object]) -> object:
    try:
        return await score
    except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop and all its other tasks
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def describe(error: BaseException) -> str:
    """One line: type, text and the innermost line of code, not one of this package where that raises on purpose."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and (frames[-1].line or "").startswith("raise"):
        frames = [frame for frame in frames if Path(__file__).parents[2] not in Path(frame.filename).parents]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:1000].strip()}{where}"


def _unscored(error: BaseException) -> RewardResult:
    """A grader that stops in time with a TimeoutError is late, not broken."""
    return failed("timeout" if isinstance(error, TimeoutError) else "error", 0.0, describe(error))


def _scored(value: object) -> RewardResult:
    score, extra = read_score(value)
    if not is_reward(score):
        return failed("error", 0.0, f"the grader returned {score}, which is not finite in float32")
    if len(json.dumps(extra)) > MAX_EXTRA_BYTES:
        return failed("error", 0.0, f"the grader returned more than {MAX_EXTRA_BYTES} bytes of extra values")
    return RewardResult(score, extra, "ok", 0.0)


def read_score(value: object) -> tuple[float, dict[str, object]]:
    """Score and extra values of what a verl `compute_score` may return.

    A dict carries `score`, its other keys are extra; of a sequence the first counts; a plain number is also `acc`.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"the grader returned a dict without 'score': {sorted(map(str, value))[:10]}")
        return _number(value["score"]), {str(k): plain(v) for k, v in value.items() if k != "score"}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        value = value[0]
    score = _number(value)
    return score, {"acc": score}


def _number(value: object) -> float:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bool | int | float):
        return float(value)
    raise TypeError(f"the grader returned {type(value).__name__} instead of a number")
