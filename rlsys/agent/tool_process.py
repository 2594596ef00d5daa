"""What a tool process does: the pool of rlsys.rewards.pool starts it with `call` or `call_async` as its grader.

An item names a target (data_source), a method (solution_str) and arguments (ground_truth); `extra_info` names the
object that the call belongs to; `cut` are the arguments of `as_text`. Objects live as long as their process.
"""

import asyncio
import inspect
from collections.abc import Mapping
from functools import cache, partial
from numbers import Real
from typing import Any

from rlsys.agent.message_images import image_part
from rlsys.agent.tools import as_text, load_target
from rlsys.telemetry.jsonl import JsonObject
from rlsys.utils.plugins import named_arguments

CREATE, LOST, RESPOND = "create", "lost", "generate_response"
_OBJECTS: dict[str, Any] = {}
loaded = cache(partial(load_target, key="tools"))
"""Tools as their files were when the process started, also where a file is edited while the job runs."""


def call(
    data_source: str, solution_str: str, ground_truth: JsonObject, extra_info: JsonObject, cut: JsonObject
) -> dict[str, object]:
    """Call a function, or a method of an object; {"status": "lost"} where this process does not have the object."""
    if not (key := extra_info.get("object", "")):
        return _answer(loaded(data_source)(**ground_truth), cut)
    if solution_str == CREATE:
        made = _OBJECTS[key] = loaded(data_source)(**extra_info["config"])
        if not extra_info["config"]:
            return _answer(_method(made, "reset", ground_truth), cut)
        _wait((made.start_interaction if hasattr(made, "start_interaction") else made.create)(key, **ground_truth))
        return _answer(None, cut)
    if key not in _OBJECTS:
        return {"score": 0.0, "status": LOST}
    if solution_str == "close":
        owner = _OBJECTS.pop(key)
        end = getattr(owner, "finalize_interaction", None) or getattr(owner, "release", None)
        return _answer(_wait(end(key)) if end else _method(owner, "close", {}), cut)
    if solution_str == RESPOND:
        ends, text, score, _ = _wait(_OBJECTS[key].generate_response(key, **ground_truth))
        return {"score": float(score or 0.0), "text": text, "ends": bool(ends)}
    if solution_str == "execute":
        return _answer(_wait(_OBJECTS[key].execute(key, dict(ground_truth))), cut)
    return _answer(_method(_OBJECTS[key], solution_str, ground_truth), cut)


async def call_async(data_source: str, ground_truth: JsonObject, cut: JsonObject, **_: object) -> dict[str, object]:
    """Call an async function; many of them run at once in one process."""
    return _answer(await loaded(data_source)(**ground_truth), cut)


def _method(owner: object, name: str, arguments: Mapping[str, object]) -> object:
    """What a method returns; `reset` gets only the arguments that it names."""
    if (method := getattr(owner, name, None)) is None:
        return None
    return _wait(method(**(named_arguments(method, arguments) if name == "reset" else arguments)))


def _wait(result: Any) -> Any:
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _answer(result: Any, cut: JsonObject) -> dict[str, object]:
    """The result as text; of verl's (text, reward, metrics) the reward too, and a number also as `value`."""
    result, reward, *_ = (*result, None, None) if isinstance(result, tuple) else (result, None)
    shown, images = _without_images(result)
    return {
        **({"images": [image_part(image)["image_url"]["url"] for image in images]} if images else {}),
        "score": float(reward or 0.0),
        "text": "" if shown is None else as_text(shown, **cut),
        "value": float(result) if isinstance(result, Real) else None,
    }


def _without_images(result: object) -> tuple[object, list[object]]:
    """What a tool returned besides images, and these: PIL images, also in a list, or those of verl's ToolResponse."""
    if not isinstance(result, list) and not _is_image(result):
        return getattr(result, "text", result), list(getattr(result, "image", None) or ())
    items = result if isinstance(result, list) else [result]
    images, rest = [item for item in items if _is_image(item)], [item for item in items if not _is_image(item)]
    return (result, []) if not images else (rest if len(rest) > 1 else next(iter(rest), None), images)


def _is_image(value: object) -> bool:
    return type(value).__module__.startswith("PIL.")
