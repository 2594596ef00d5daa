"""Memory shared by the processes of one host, and tensors packed side by side in it.

The memory is an anonymous file (Linux memfd): it has no name in any directory, so nothing is left behind after a
kill -9 of any process, and a small /dev/shm does not limit it. Other processes of the same user open it through the
creator's entry in /proc, as long as the creator lives.
"""

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rlsys.utils.errors import WeightTransferError, raised_as
from rlsys.weights.layout import dtype_of, element_bytes, row_major_strides

ALIGN_BYTES = 64


class SharedMemory:
    """`path` opens it in another process of this host; `bytes` is the mapped memory as a uint8 tensor."""

    def __init__(self, fd: int, path: str, num_bytes: int) -> None:
        self._fd, self.path = fd, path
        self._map = mmap.mmap(fd, num_bytes)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedMemory":
        """Zeros, reserved at once; WeightTransferError when there is not enough memory."""
        if sys.platform != "linux":
            raise WeightTransferError("shared-memory weight transfer needs Linux; colocate trainer and rollout instead")
        fd = os.memfd_create("rlsys-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}", num_bytes)
        except OSError as error:
            os.close(fd)
            raise WeightTransferError(f"cannot allocate {num_bytes >> 20} MiB of shared memory: {error}") from error

    @classmethod
    def open(cls, path: str, num_bytes: int) -> "SharedMemory":
        """Map the memory of another process, or a file; WeightTransferError when it is missing or of another size."""
        with raised_as(WeightTransferError, f"cannot open the trainer's shared memory {path}", OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if (size := os.fstat(fd).st_size) != num_bytes:
            os.close(fd)
            raise WeightTransferError(f"{path} has {size} bytes instead of the expected {num_bytes}")
        return cls(fd, path, num_bytes)

    def close(self) -> None:
        """Unmap as soon as no tensor uses the memory any more."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class TensorHandle:
    """A tensor inside a storage of a process, by its number there; the offset is in elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * element_bytes(self.dtype)

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in its storage."""
        empty = torch.empty(0, dtype=dtype_of(self.dtype), device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def pack_tensors(
    tensors: Iterable[tuple[str, tuple[int, ...], str]], *, align_bytes: int = ALIGN_BYTES
) -> tuple[dict[str, TensorHandle], int]:
    """Places for tensors (name, shape, dtype) one after the other, and the bytes of all of them, at least one."""
    packed, end = dict[str, TensorHandle](), 0
    for name, shape, dtype in tensors:
        handle = TensorHandle(0, dtype, tuple(shape), row_major_strides(shape), end // element_bytes(dtype))
        packed[name] = handle
        end = -(-(end + handle.num_bytes) // align_bytes) * align_bytes
    return packed, max(end, 1)


def unpack_tensors(memory: Tensor, packed: Mapping[str, TensorHandle]) -> dict[str, Tensor]:
    """Views of packed tensors in the bytes of their memory, by name."""
    return {name: handle.of(memory.untyped_storage()) for name, handle in packed.items()}
