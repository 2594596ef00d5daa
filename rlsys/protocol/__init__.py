"""DataProto, the rows that travel between the controller and its workers, with verl's names and semantics."""

from rlsys.ipc.codec import object_array as object_array
from rlsys.ipc.framing import WireError as WireError
from rlsys.protocol.columns import union_numpy_dict as union_numpy_dict
from rlsys.protocol.columns import union_tensor_dict as union_tensor_dict
from rlsys.protocol.data import DataProto as DataProto
from rlsys.protocol.data import DataProtoConfig as DataProtoConfig
from rlsys.protocol.data import DataProtoItem as DataProtoItem
from rlsys.protocol.future import DataProtoFuture as DataProtoFuture
from rlsys.protocol.gather import all_gather_data_proto as all_gather_data_proto
from rlsys.protocol.images import IMAGES as IMAGES
from rlsys.protocol.images import ImageInputs as ImageInputs
from rlsys.protocol.images import images_of as images_of
from rlsys.protocol.rows import collate_fn as collate_fn
from rlsys.protocol.rows import fold_batch_dim as fold_batch_dim
from rlsys.protocol.rows import pad_dataproto_to_divisor as pad_dataproto_to_divisor
from rlsys.protocol.rows import response_lengths as response_lengths
from rlsys.protocol.rows import unfold_batch_dim as unfold_batch_dim
from rlsys.protocol.rows import unpad_dataproto as unpad_dataproto
