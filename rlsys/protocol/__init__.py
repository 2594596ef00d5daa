"""DataProto, the rows that travel between the controller and its workers, with verl's names and semantics."""

from rlsys.ipc.framing import WireError
from rlsys.protocol.columns import object_array, union_numpy_dict, union_tensor_dict
from rlsys.protocol.data import DataProto, DataProtoConfig, DataProtoItem
from rlsys.protocol.future import DataProtoFuture
from rlsys.protocol.gather import all_gather_data_proto
from rlsys.protocol.images import IMAGES, ImageInputs, images_of
from rlsys.protocol.rows import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    response_lengths,
    unfold_batch_dim,
    unpad_dataproto,
)

__all__ = [
    "IMAGES",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "ImageInputs",
    "WireError",
    "all_gather_data_proto",
    "collate_fn",
    "fold_batch_dim",
    "images_of",
    "object_array",
    "pad_dataproto_to_divisor",
    "response_lengths",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
