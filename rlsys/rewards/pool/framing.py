"""How the pool and its children speak: a 4-byte big-endian length, then JSON in UTF-8."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

MAX_FRAME_BYTES = 256 << 20


class FrameError(ValueError):
    """The other side sent something that is not a frame."""


def encode(message: dict[str, Any]) -> bytes:
    """A frame holding `message`; NaN and infinities pass as Python's JSON writes them."""
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


class FrameBuffer:
    """Collects bytes as they arrive and hands out whole messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Add `data`; yields every message it completes. Raises FrameError on anything malformed."""
        self._data += data
        while len(self._data) >= 4:
            end = 4 + int.from_bytes(self._data[:4], "big")
            if end > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {end} bytes is announced, the limit is {MAX_FRAME_BYTES}")
            if len(self._data) < end:
                return
            body = bytes(self._data[4:end])
            del self._data[:end]
            yield decode(body)


def decode(body: bytes) -> dict[str, Any]:
    """The message in the body of a frame."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame does not hold JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError("a frame does not hold a JSON object")
    return message


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Wait for one message on a blocking socket; None when the other side has closed."""
    head = _receive_exactly(sock, 4)
    if head is None:
        return None
    body = _receive_exactly(sock, int.from_bytes(head, "big"))
    return None if body is None else decode(body)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {num_bytes} bytes is announced, the limit is {MAX_FRAME_BYTES}")
    parts = bytearray()
    while len(parts) < num_bytes:
        part = sock.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


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
