"""The wire form of a DataProto: a typed header and the raw memory of its tensors and number arrays.

`encode` copies nothing that is contiguous on the CPU; `decode` copies read-only memory, but for that of the batch.
In a file: magic, a table of the lengths and checksums of header and buffers, then these.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, BinaryIO, Literal, cast

import numpy as np
from msgspec import Meta, Struct
from msgspec.msgpack import Ext
from tensordict import TensorDict
from torch import Tensor

from rlsys.ipc import codec
from rlsys.ipc.framing import Buffer, WireError

MAGIC = b"RLSYSDP3"
OTHER_VERSION = (
    "this file was written by another version of rlsys, most often an older one, and cannot be read by this one; "
    "resume with the version that wrote it, or start from the beginning with trainer.resume_mode=disable"
)
_HEAD = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<QI")
_SUM = struct.Struct("<I")


class DataProtoHeader(Struct, tag="DataProto/2", forbid_unknown_fields=True):
    """The three parts of a DataProto; `num_rows` and `device` are those of its TensorDict, None without one.

    The tensors of a decoded header may have read-only memory, its other values never.
    """

    num_rows: Annotated[int, Meta(ge=0, lt=1 << 48)] | None
    device: Literal["cpu"] | None
    batch: dict[str, Ext]
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The batch once decoded."""
        return cast(dict[str, Tensor], self.batch)

    def tensordict(self) -> TensorDict | None:
        """The batch."""
        return None if self.num_rows is None else TensorDict(self.tensors, (self.num_rows,), device=self.device)


def encode(
    batch: TensorDict | None, non_tensor_batch: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]
) -> tuple[bytes, list[memoryview]]:
    """(header, buffers); TypeError naming the key whose value cannot be sent."""
    num_rows, device = (None, None) if batch is None else (batch.batch_size[0], batch.device and "cpu")
    tensors = {} if batch is None else dict(batch.items())
    for key in (*tensors, *non_tensor_batch, *meta_info):
        if type(key) is not str:
            raise TypeError(f"{key!r} is not a string, so it cannot name a column on the wire")
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"batch '{key}': a {type(tensor).__name__} cannot be sent as a tensor")
    for key, array in non_tensor_batch.items():
        if not array.ndim:
            raise TypeError(f"non_tensor_batch '{key}': an array without rows cannot be sent")
    header = DataProtoHeader(num_rows, device, tensors, dict(non_tensor_batch), dict(meta_info))  # pyrefly: ignore
    return codec.encode(header)


def decode(header: Buffer, buffers: Sequence[Buffer]) -> DataProtoHeader:
    """The parts over the memory of `buffers`; WireError unless header and buffers fit exactly."""
    parts = codec.decode(header, buffers, DataProtoHeader, aliased="batch")
    if parts.num_rows is None and parts.batch:
        raise WireError("the header does not give the number of rows")
    columns = (*parts.tensors.values(), *parts.non_tensor_batch.values())
    lengths = {len(column) if column.ndim else -1 for column in columns}
    if len(lengths) > 1 or -1 in lengths or (parts.num_rows is not None and lengths - {parts.num_rows}):
        raise WireError(f"columns with {sorted(lengths)} rows in a batch of {parts.num_rows}")
    return parts


def write_stream(file: BinaryIO, header: bytes, buffers: Sequence[Buffer]) -> None:
    """Write a wire form from the start of `file`."""
    parts = [memoryview(part).cast("B") for part in (header, *buffers)]
    front = _HEAD.pack(MAGIC, len(parts)) + b"".join(_ENTRY.pack(part.nbytes, zlib.crc32(part)) for part in parts)
    file.writelines((front, _SUM.pack(zlib.crc32(front)), *parts))


def read_stream(file: BinaryIO, file_bytes: int) -> tuple[bytes, list[bytearray]]:
    """Header and buffers, each in memory of its own, that fill the `file_bytes` of `file`; WireError if a byte is
    missing or changed."""
    head = _take(file, _HEAD.size)
    magic, num_parts = _HEAD.unpack(head)
    if magic != MAGIC:
        raise WireError(OTHER_VERSION if magic[:-1] == MAGIC[:-1] else "this file does not hold a DataProto")
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
