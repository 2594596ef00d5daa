"""Process groups of an engine, and small exchanges between its ranks."""

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.device_mesh import DeviceMesh

from rlsys.protocol.gather import exchange_device, gather_bytes
from rlsys.utils.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class EngineRanks:
    """Where this rank is among those of its engine.

    Ranks of one `dp_rank` see the same rows; the results of the one with `is_collect` are collected. The sums of the
    ranks of `loss_group` (None: all ranks) that have `reports_loss` add up to the global ones.
    """

    device: torch.device
    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    is_collect: bool
    reports_loss: bool
    loss_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Ranks(EngineRanks):
    """The groups of FSDPEngine; `mesh` is FSDP2's, and `copy_size` ranks hold one copy of the parameters.

    Ranks that split matrices are neighbours, and of their groups those that share sequences.
    """

    mesh: DeviceMesh
    tp_mesh: DeviceMesh | None
    tp_size: int
    copy_size: int
    shard_size: int
    sp_size: int
    sp_group: dist.ProcessGroup | None


def ensure_process_group(device: str, *, timeout_s: float = 600.0) -> None:
    """Join the default process group unless this process already has one.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment say which; without RANK it is a group of one that
    opens no port. CPU tensors use gloo, CUDA tensors NCCL.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif os.environ["MASTER_ADDR"].startswith("127.") and "TORCHELASTIC_RUN_ID" not in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = _loopback_store(rank, world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def _loopback_store(rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """The store at MASTER_ADDR:MASTER_PORT, where rank 0 listens on that address only; torch listens on all of them."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return dist.TCPStore(address, port, world_size, False, timeout)
    listener = socket.create_server((address, port))
    return dist.TCPStore(address, port, world_size, True, timeout, master_listen_fd=listener.detach())


def make_ranks(device: str, *, fsdp_size: int = -1, sp_size: int = 1, tp_size: int = 1) -> Ranks:
    """The groups of an engine over all ranks of the default process group; ConfigError if the sizes do not divide.

    `fsdp_size` ranks share one copy of the parameters (-1, or more than there are: all), `tp_size` of them each matrix,
    and `sp_size` such groups each sequence.
    """
    ensure_process_group(device)
    rank, world, sp, tp = dist.get_rank(), dist.get_world_size(), sp_size, tp_size
    copy = world if fsdp_size in (-1, 0) else min(fsdp_size, world)
    if sp < 1 or tp < 1 or world % (sp * tp):
        raise ConfigError(f"ulysses_sequence_parallel_size={sp} x tensor_parallel_size={tp} must divide {world} ranks")
    if copy < 1 or world % copy or copy % tp:
        raise ConfigError(f"fsdp_size={fsdp_size} does not divide the {world} ranks, or tensor_parallel_size={tp} it")
    own, grid = own_device(device), torch.arange(world)
    fsdp_dims = {"shard": copy // tp} if copy == world else {"replicate": world // copy, "shard": copy // tp}
    dims = {**fsdp_dims, "tp": tp} if tp > 1 else fsdp_dims
    mesh = DeviceMesh(own.type, grid.view(*dims.values()), mesh_dim_names=tuple(dims))
    lanes = DeviceMesh(own.type, grid.view(-1, sp, tp), mesh_dim_names=("dp", "sp", "tp")) if sp * tp > 1 else None
    return Ranks(
        device=own,
        rank=rank,
        world_size=world,
        dp_rank=rank // (sp * tp),
        dp_size=world // (sp * tp),
        is_collect=rank % (sp * tp) == 0,
        reports_loss=True,
        loss_group=lanes.get_group("dp") if lanes else None,
        mesh=mesh[tuple(fsdp_dims)] if tp > 1 else mesh,
        tp_mesh=mesh["tp"] if tp > 1 else None,
        tp_size=tp,
        copy_size=copy,
        shard_size=copy // tp,
        sp_size=sp,
        sp_group=lanes.get_group("sp") if lanes and sp > 1 else None,
    )


def own_device(name: str) -> torch.device:
    """The device of this rank, which becomes the current one."""
    own = torch.device(name)
    if own.type == "cuda":
        own = torch.device("cuda", torch.cuda.current_device() if own.index is None else own.index)
        torch.cuda.set_device(own)
    return own


def gather_json(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank; values must be JSON-serialisable."""
    text = json.dumps(value).encode()
    return [json.loads(part) for part in ([text] if dist.get_world_size(group) == 1 else gather_bytes(text, group))]


def sum_over_ranks(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, float]]:
    """The ranks' (sum, count) by name, added up in the order of the ranks."""
    sums = {}
    for name in sorted(set().union(*parts)):
        pairs = [part[name] for part in parts if name in part]
        sums[name] = sum(total for total, _ in pairs), sum(count for _, count in pairs)
    return sums


def max_over_ranks(value: int) -> int:
    """The largest of the ranks' numbers."""
    if dist.get_world_size() == 1:
        return value
    number = torch.tensor([value], device=exchange_device(None))
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number)


def together(work: Callable[[], object], *, only_first: bool = False) -> Any:
    """Do `work` on files on every rank, or on rank 0 alone; if it fails anywhere, CheckpointError on all ranks, which
    names the first that failed."""
    result, message = None, None
    try:
        if not only_first or dist.get_rank() == 0:
            result = work()
    except (OSError, SafetensorError, CheckpointError, KeyError) as error:
        message = f"{error}" or type(error).__name__
    if failed := [(rank, text) for rank, text in enumerate(gather_json(message)) if text is not None]:
        raise CheckpointError((f"rank {failed[0][0]}: " if dist.get_world_size() > 1 else "") + failed[0][1])
    return result
