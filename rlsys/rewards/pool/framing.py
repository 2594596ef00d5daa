"""How the pool and its children exchange messages: a frame with a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.ipc.framing import Buffer, WireError, frame

MAX_FRAME_BYTES = 256 << 20


def encode(message: dict[str, Any]) -> bytes:
    """A frame holding `message`; NaN and infinities pass as Python's JSON writes them."""
    return frame([json.dumps(message).encode()], max_bytes=MAX_FRAME_BYTES)


def decode(parts: Sequence[Buffer]) -> dict[str, Any]:
    """The message in a frame; WireError if it is not a JSON object."""
    try:
        message = json.loads(bytes(parts[0]))
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame does not hold JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError("a frame does not hold a JSON object")
    return message


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy and torch values become numbers and lists, the unknown becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
