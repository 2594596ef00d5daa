"""DataProto, the rows that travel between the controller and its workers, with verl's names and semantics."""

from rlsys.ipc.codec import object_array
from rlsys.ipc.framing import WireError
from rlsys.protocol.columns import union_numpy_dict, union_tensor_dict
from rlsys.protocol.data import DataProto, DataProtoConfig, DataProtoItem
from rlsys.protocol.future import DataProtoFuture
from rlsys.protocol.gather import all_gather_data_proto
from rlsys.protocol.images import IMAGES, ImageInputs, images_of
from rlsys.protocol.rows import collate_fn as collate_fn
from rlsys.protocol.rows import fold_batch_dim as fold_batch_dim
from rlsys.protocol.rows import pad_dataproto_to_divisor as pad_dataproto_to_divisor
from rlsys.protocol.rows import response_lengths as response_lengths
from rlsys.protocol.rows import unfold_batch_dim as unfold_batch_dim
from rlsys.protocol.rows import unpad_dataproto as unpad_dataproto
