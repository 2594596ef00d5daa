"""The wire form of a DataProto: a typed header and the raw memory of its tensors and number arrays.

`encode` copies nothing that is contiguous on the CPU; `decode` copies read-only memory, but for that of the batch.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
from msgspec import Meta, Struct
from msgspec.msgpack import Ext
from tensordict import TensorDict
from torch import Tensor

from rlsys.ipc import codec
from rlsys.ipc.framing import Buffer, WireError


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
