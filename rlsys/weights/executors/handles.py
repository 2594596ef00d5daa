"""Lending memory to another process: CUDA IPC handles for device tensors, shared files for those on the host.

An offer is plain data: bytes and numbers, nothing that is unpickled into code. The lender keeps the tensors alive.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rlsys.utils.errors import WeightTransferError
from rlsys.weights.layout import dtype_of
from rlsys.weights.segment import Segment


@dataclass(frozen=True)
class Memory:
    """One storage: a path and size on the host, or the eight plain values of a CUDA IPC handle.

    A process cannot open a handle of its own: there `lender` and `address` find the storage itself.
    """

    device: str
    num_bytes: int
    path: str = ""
    handle: tuple[Any, ...] = ()
    lender: str = ""
    address: int = 0


PROCESS = uuid4().hex
_lent_here: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()


@dataclass(frozen=True)
class Lent:
    """A tensor inside a lent memory; the offset is in elements."""

    memory: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Offer:
    """What a process lends: its memories and the tensors in them by name."""

    memories: tuple[Memory, ...]
    tensors: Mapping[str, Lent]


def offer_of(tensors: Mapping[str, Tensor]) -> Offer:
    """Lend live tensors; host tensors move into shared memory in place, device tensors stay where they are."""
    memories: list[Memory] = []
    numbers: dict[int, int] = {}
    lent = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in numbers:
            numbers[key] = len(memories)
            memories.append(_lend(storage))
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset = int(tensor.storage_offset())
        lent[name] = Lent(numbers[key], dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)
    return Offer(tuple(memories), lent)


def _lend(storage: torch.UntypedStorage) -> Memory:
    if storage.device.type == "cuda":
        _lent_here[storage.data_ptr()] = storage
        handle = tuple(storage._share_cuda_())
        return Memory("cuda", storage.nbytes(), handle=handle, lender=PROCESS, address=storage.data_ptr())
    if storage.device.type != "cpu" or not storage.nbytes():
        raise WeightTransferError(f"memory of {storage.nbytes()} bytes on {storage.device} cannot be lent")
    fd, num_bytes = storage._share_fd_cpu_()
    return Memory("cpu", num_bytes, path=f"/proc/{os.getpid()}/fd/{fd}")


class Borrowed:
    """Tensors of another process, mapped here; `close` before the lender goes away."""

    def __init__(self, offer: Offer, names: Collection[str], *, device: torch.device) -> None:
        """Map what the named tensors need. Device memory of any GPU of this host appears on `device`."""
        self._segments: list[Segment] = []
        storages: dict[int, torch.UntypedStorage] = {}
        self.tensors: dict[str, Tensor] = {}
        for name in names:
            lent = offer.tensors.get(name)
            if lent is None:
                raise WeightTransferError(f"the trainer lends no tensor '{name}'")
            if lent.memory not in storages:
                storages[lent.memory] = self._open(offer.memories[lent.memory], device)
            empty = torch.empty(0, dtype=dtype_of(lent.dtype), device=storages[lent.memory].device)
            if _end_bytes(lent, empty.element_size()) > storages[lent.memory].nbytes():
                raise WeightTransferError(f"the trainer's tensor '{name}' does not fit into what it lends")
            self.tensors[name] = empty.set_(storages[lent.memory], lent.offset, lent.shape, lent.stride)

    def _open(self, memory: Memory, device: torch.device) -> torch.UntypedStorage:
        if memory.device == "cpu":
            segment = Segment.open(memory.path, memory.num_bytes)
            self._segments.append(segment)
            return segment.bytes.untyped_storage()
        if memory.lender == PROCESS:
            return _lent_here[memory.address]
        if device.type != "cuda":
            raise WeightTransferError(f"device memory cannot be read by an engine on {device}")
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        # The memory is mapped for this process's own GPU, wherever it lies: kernels here may then read it.
        return torch.UntypedStorage._new_shared_cuda(index, *memory.handle[1:])

    def close(self) -> None:
        self.tensors = {}
        for segment in self._segments:
            segment.close()
        self._segments = []


def _end_bytes(lent: Lent, itemsize: int) -> int:
    if not prod(lent.shape):
        return 0
    return itemsize * (lent.offset + 1 + sum((n - 1) * step for n, step in zip(lent.shape, lent.stride, strict=True)))
