"""Wire forms in a file: magic, a table of lengths and checksums, the header, then every buffer at a multiple of 64."""

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rlsys.ipc.framing import Buffer, WireError
from rlsys.utils.atomic import written_whole

MAGIC = b"RLSYSDP2"
OTHER_VERSION = (
    "this file was written by another version of rlsys, most often an older one, and cannot be read by this one; "
    "resume with the version that wrote it, or start from the beginning with trainer.resume_mode=disable"
)
ALIGN_BYTES = 64
_HEAD = struct.Struct("<8sQQ")
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
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    table = b"".join(_ENTRY.pack(view.nbytes, zlib.crc32(view)) for view in views)
    front = _HEAD.pack(MAGIC, len(header), len(views)) + table + header
    file.write(front + _SUM.pack(zlib.crc32(front)))
    for view in views:
        file.write(b"\0" * (-file.tell() % ALIGN_BYTES))
        file.write(view)


def read_stream(file: BinaryIO, file_bytes: int) -> tuple[bytes, list[bytearray]]:
    """Read a wire form that fills the `file_bytes` of `file`; WireError if a byte is missing or changed."""
    head = _take(file, _HEAD.size)
    magic, header_bytes, num_buffers = _HEAD.unpack(head)
    if magic != MAGIC:
        is_dataproto = magic[:-1] == MAGIC[:-1]
        raise WireError(OTHER_VERSION if is_dataproto else "this file does not hold a DataProto")
    if header_bytes + num_buffers * _ENTRY.size + _HEAD.size + _SUM.size > file_bytes:
        raise WireError("the file is truncated")
    table = _take(file, num_buffers * _ENTRY.size)
    header = _take(file, header_bytes)
    (checksum,) = _SUM.unpack(_take(file, _SUM.size))
    if zlib.crc32(head + table + header) != checksum:
        raise WireError("the header is corrupt")
    buffers = [_take_buffer(file, *entry, file_bytes=file_bytes) for entry in _ENTRY.iter_unpack(table)]
    if file.tell() != file_bytes:
        raise WireError("the file has bytes after its last buffer")
    return bytes(header), buffers


def _take_buffer(file: BinaryIO, num_bytes: int, checksum: int, *, file_bytes: int) -> bytearray:
    if any(_take(file, -file.tell() % ALIGN_BYTES)):
        raise WireError("the file is corrupt between two buffers")
    if file.tell() + num_bytes > file_bytes:
        raise WireError("the file is truncated")
    data = _take(file, num_bytes)
    if zlib.crc32(data) != checksum:
        raise WireError("a buffer is corrupt")
    return data


def _take(file: BinaryIO, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    if file.readinto(data) != num_bytes:  # pyrefly: ignore
        raise WireError("the file is truncated")
    return data
