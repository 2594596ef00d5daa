"""Messages on a stream socket: a frame is the number of its parts, their lengths, then the body and the buffers."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Generic

from msgspec import Struct

from rlsys.ipc.codec import M, WireError, decode, encode

NUM_PARTS = struct.Struct("!I")
MAX_PARTS = 1 << 16


def send(link: socket.socket, message: Struct) -> None:
    """Send a message on a blocking socket."""
    for part in _parts(message):
        link.sendall(part)


def frame(message: Struct, *, max_bytes: int) -> bytes:
    """A message as one piece of memory; WireError if it is larger than the receiver accepts."""
    whole = b"".join(_parts(message))
    if len(whole) > max_bytes:
        raise WireError(f"a message of {len(whole)} bytes is over the limit of {max_bytes}")
    return whole


def _parts(message: Struct) -> list[bytes | memoryview]:
    body, buffers = encode(message)
    sizes = [len(body), *(buffer.nbytes for buffer in buffers)]
    return [NUM_PARTS.pack(len(sizes)) + struct.pack(f"!{len(sizes)}Q", *sizes), body, *buffers]


def receive(link: socket.socket, message: type[M], *, max_bytes: int) -> M:
    """Wait for a message on a blocking socket; EOFError where the other side has closed it."""
    num_parts = _num_parts(_read(link, NUM_PARTS.size))
    body, *buffers = [_read(link, size) for size in _sizes(_read(link, 8 * num_parts), max_bytes)]
    return decode(body, buffers, message)


def _read(link: socket.socket, num_bytes: int) -> bytearray:
    data, filled = bytearray(num_bytes), 0
    view = memoryview(data)
    while filled < num_bytes:
        received = link.recv_into(view[filled:])
        if not received:
            raise EOFError("the other side closed the connection")
        filled += received
    return data


def _num_parts(head: bytes | bytearray) -> int:
    (num_parts,) = NUM_PARTS.unpack(head)
    if not 0 < num_parts <= MAX_PARTS:
        raise WireError(f"a frame of {num_parts} parts; at most {MAX_PARTS} are accepted")
    return num_parts


def _sizes(table: bytes | bytearray, max_bytes: int) -> tuple[int, ...]:
    sizes = struct.unpack(f"!{len(table) // 8}Q", table)
    if sum(sizes) > max_bytes:
        raise WireError(f"a frame of {sum(sizes)} bytes is over the limit of {max_bytes}")
    return sizes


class FrameBuffer(Generic[M]):
    """Collects the bytes of a non-blocking socket and returns the messages that are complete."""

    def __init__(self, message: type[M], *, max_bytes: int) -> None:
        self._message, self._max_bytes, self._data = message, max_bytes, bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Add `data`; yields every message it completes. WireError on anything malformed."""
        self._data += data
        while (parts := self._take()) is not None:
            yield decode(parts[0], parts[1:], self._message)

    def _take(self) -> list[bytearray] | None:
        start = NUM_PARTS.size
        if len(self._data) < start:
            return None
        end = start + 8 * _num_parts(self._data[:start])
        if len(self._data) < end:
            return None
        sizes = _sizes(self._data[start:end], self._max_bytes)
        if len(self._data) < end + sum(sizes):
            return None
        parts = []
        for size in sizes:
            parts.append(self._data[end : end + size])
            end += size
        del self._data[:end]
        return parts
