"""Frames on a stream socket: the number of parts, their lengths, then the parts. Needs neither torch nor numpy."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

NUM_PARTS = struct.Struct("!I")
MAX_PARTS = 1 << 16
Buffer = bytes | bytearray | memoryview


class WireError(ValueError):
    """Bytes that should hold a message do not: truncated, corrupt or made by something else."""


def send(link: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send a frame on a blocking socket."""
    for piece in (_head(parts), *parts):
        link.sendall(piece)


def frame(parts: Sequence[Buffer], *, max_bytes: int) -> bytes:
    """A frame as one piece of memory; WireError if it is larger than the receiver accepts."""
    if (num_bytes := sum(map(len, parts))) > max_bytes:
        raise WireError(f"a message of {num_bytes} bytes is over the limit of {max_bytes}")
    return b"".join([_head(parts), *parts])


def _head(parts: Sequence[Buffer]) -> bytes:
    return NUM_PARTS.pack(len(parts)) + struct.pack(f"!{len(parts)}Q", *map(len, parts))


def receive(link: socket.socket, *, max_bytes: int) -> list[bytearray]:
    """Wait for a frame on a blocking socket; EOFError where the other side has closed it, WireError if malformed."""
    num_parts = _num_parts(_read(link, NUM_PARTS.size))
    return [_read(link, size) for size in _sizes(_read(link, 8 * num_parts), max_bytes)]


def _read(link: socket.socket, num_bytes: int) -> bytearray:
    data, filled = bytearray(num_bytes), 0
    view = memoryview(data)
    while filled < num_bytes:
        received = link.recv_into(view[filled:])
        if not received:
            raise EOFError("the other side closed the connection")
        filled += received
    return data


def _num_parts(head: Buffer) -> int:
    (num_parts,) = NUM_PARTS.unpack(head)
    if not 0 < num_parts <= MAX_PARTS:
        raise WireError(f"a frame of {num_parts} parts; 1 to {MAX_PARTS} are accepted")
    return num_parts


def _sizes(table: Buffer, max_bytes: int) -> tuple[int, ...]:
    sizes = struct.unpack(f"!{len(table) // 8}Q", table)
    if sum(sizes) > max_bytes:
        raise WireError(f"a frame of {sum(sizes)} bytes is over the limit of {max_bytes}")
    return sizes


class FrameBuffer:
    """Collects the bytes of a non-blocking socket and returns the frames that are complete."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes, self._data = max_bytes, bytearray()

    def feed(self, data: bytes) -> Iterator[list[bytearray]]:
        """Add `data`; yields the parts of every frame it completes. WireError on anything malformed."""
        self._data += data
        while parts := self._take():
            yield parts

    def _take(self) -> list[bytearray]:
        start = NUM_PARTS.size
        end = start + 8 * _num_parts(self._data[:start]) if len(self._data) >= start else start
        if len(self._data) < end or end == start:
            return []
        sizes = _sizes(self._data[start:end], self._max_bytes)
        if len(self._data) < end + sum(sizes):
            return []
        parts = []
        for size in sizes:
            parts.append(self._data[end : end + size])
            end += size
        del self._data[:end]
        return parts
