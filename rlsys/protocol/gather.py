"""DataProto over a process group: every rank ends with the rows of all."""

import io

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rlsys.protocol.columns import concat_arrays, tensors_of
from rlsys.protocol.data import DataProto
from rlsys.protocol.wire import decode, encode, read_stream, write_stream


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup) -> None:
    """Replace the rows of `data` by those of all ranks in rank order, in place; all ranks must hold equal shapes."""
    device = exchange_device(process_group)
    if (batch := data.batch) is not None:
        tensors = tensors_of(batch)
        rows = {key: _gather(tensors[key].to(device), process_group) for key in sorted(tensors)}
        joined = {key: rows[key].to(tensor.device) for key, tensor in tensors.items()}
        data.batch = TensorDict(joined, (len(batch) * dist.get_world_size(process_group),), device=batch.device)
    stream = io.BytesIO()
    write_stream(stream, *encode(None, data.non_tensor_batch, {}))
    texts = gather_bytes(stream.getvalue(), process_group)
    columns = [decode(*read_stream(io.BytesIO(text), len(text))) for text in texts]
    data.non_tensor_batch = concat_arrays([part.non_tensor_batch for part in columns])


def exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the ranks of a group exchange small things: on the CPU if the group has a way for that."""
    has_gloo = "gloo" in str(dist.get_backend_config(group))
    return torch.device("cpu") if has_gloo else torch.device("cuda", torch.cuda.current_device())


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank."""
    device = exchange_device(group)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    lengths = _gather(torch.tensor([len(mine)], device=device), group).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    rows = _gather(padded[None], group).cpu()
    return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]
