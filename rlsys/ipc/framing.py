"""Frames on a stream socket: the number of parts, their lengths, then the parts. Needs neither torch nor numpy."""

import socket
import struct
from collections.abc import Sequence

NUM_PARTS = struct.Struct("!I")
MAX_PARTS = 1 << 16
Buffer = bytes | bytearray | memoryview


class WireError(ValueError):
    """Bytes that should hold a message do not: truncated, corrupt or made by something else."""


def send(link: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send a frame on a blocking socket."""
    for piece in (NUM_PARTS.pack(len(parts)) + struct.pack(f"!{len(parts)}Q", *map(len, parts)), *parts):
        link.sendall(piece)


def receive(link: socket.socket, *, max_bytes: int) -> list[bytearray]:
    """Wait for a frame on a blocking socket; EOFError where the other side has closed it, WireError if malformed."""
    (num_parts,) = NUM_PARTS.unpack(_read(link, NUM_PARTS.size))
    if not 0 < num_parts <= MAX_PARTS:
        raise WireError(f"a frame of {num_parts} parts; 1 to {MAX_PARTS} are accepted")
    sizes = struct.unpack(f"!{num_parts}Q", _read(link, 8 * num_parts))
    if sum(sizes) > max_bytes:
        raise WireError(f"a frame of {sum(sizes)} bytes is over the limit of {max_bytes}")
    return [_read(link, size) for size in sizes]


def _read(link: socket.socket, num_bytes: int) -> bytearray:
    data, filled = bytearray(num_bytes), 0
    view = memoryview(data)
    while filled < num_bytes:
        if not (received := link.recv_into(view[filled:])):
            raise EOFError("the other side closed the connection")
        filled += received
    return data
