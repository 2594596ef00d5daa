"""Wire forms in a file: magic, a table of the lengths and checksums of header and buffers, then these."""

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rlsys.ipc.framing import Buffer, WireError
from rlsys.utils.atomic import written_whole

MAGIC = b"RLSYSDP3"
OTHER_VERSION = (
    "this file was written by another version of rlsys, most often an older one, and cannot be read by this one; "
    "resume with the version that wrote it, or start from the beginning with trainer.resume_mode=disable"
)
_HEAD = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<QI")
_SUM = struct.Struct("<I")


def write_file(path: str | os.PathLike[str], header: bytes, buffers: Sequence[Buffer]) -> None:
    """Write beside `path`, flush to disk and rename, so that `path` is never half a file."""
    with written_whole(Path(path), durable=True) as file:
        write_stream(file, header, buffers)


def read_file(path: str | os.PathLike[str]) -> tuple[bytes, list[bytearray]]:
    """Header and buffers, each in memory of its own; WireError if a byte is missing or changed."""
    with Path(path).open("rb") as file:
        return read_stream(file, os.fstat(file.fileno()).st_size)


def write_stream(file: BinaryIO, header: bytes, buffers: Sequence[Buffer]) -> None:
    """Write a wire form from the start of `file`."""
    parts = [memoryview(part).cast("B") for part in (header, *buffers)]
    table = b"".join(_ENTRY.pack(part.nbytes, zlib.crc32(part)) for part in parts)
    front = _HEAD.pack(MAGIC, len(parts)) + table
    for part in (front, _SUM.pack(zlib.crc32(front)), *parts):
        file.write(part)


def read_stream(file: BinaryIO, file_bytes: int) -> tuple[bytes, list[bytearray]]:
    """Read a wire form that fills the `file_bytes` of `file`; WireError if a byte is missing or changed."""
    head = _take(file, _HEAD.size)
    magic, num_parts = _HEAD.unpack(head)
    if magic != MAGIC:
        is_dataproto = magic[:-1] == MAGIC[:-1]
        raise WireError(OTHER_VERSION if is_dataproto else "this file does not hold a DataProto")
    if num_parts * _ENTRY.size > file_bytes:
        raise WireError("the file is truncated")
    table = _take(file, num_parts * _ENTRY.size)
    (checksum,) = _SUM.unpack(_take(file, _SUM.size))
    if zlib.crc32(head + table) != checksum:
        raise WireError("the table of its parts is corrupt")
    entries = list(_ENTRY.iter_unpack(table))
    if file.tell() + sum(num_bytes for num_bytes, _ in entries) != file_bytes:
        raise WireError("the file is truncated, or has bytes after its last buffer")
    header, *buffers = (_take(file, num_bytes) for num_bytes, _ in entries)
    if any(zlib.crc32(part) != own for part, (_, own) in zip((header, *buffers), entries, strict=True)):
        raise WireError("the header or a buffer is corrupt")
    return bytes(header), buffers


def _take(file: BinaryIO, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    if file.readinto(data) != num_bytes:  # pyrefly: ignore
        raise WireError("the file is truncated")
    return data
