"""Memory that several processes of one host share and that vanishes with the last of them.

The segment is an anonymous memory file (Linux memfd): it has no name in any directory, so nothing is left behind after
a kill -9 of any side, and containers' small /dev/shm does not bound it. Others of the same user open it through its
creator's entry in /proc, as long as the creator lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys

import torch
from torch import Tensor

from rlsys.utils.errors import WeightTransferError


class Segment:
    """`path` opens it in another process of this host; `bytes` is the mapped memory as a uint8 tensor."""

    def __init__(self, fd: int, path: str, num_bytes: int) -> None:
        self._fd, self.path = fd, path
        self._map = mmap.mmap(fd, num_bytes)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """A segment of zeros, its memory reserved now; WeightTransferError when there is not enough."""
        if sys.platform != "linux":
            raise WeightTransferError("shared-memory weight transfer needs Linux; colocate trainer and rollout instead")
        fd = os.memfd_create("rlsys-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, f"/proc/{os.getpid()}/fd/{fd}", num_bytes)
        except OSError as error:
            os.close(fd)
            raise WeightTransferError(
                f"no shared memory for {num_bytes / 2**20:.0f} MiB of weights: {error}"
            ) from error

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Segment:
        """Map a segment of another process; WeightTransferError when it is not there or has another size."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightTransferError(f"cannot open the trainer's shared memory {path}: {error}") from error
        if os.fstat(fd).st_size != num_bytes:
            os.close(fd)
            raise WeightTransferError(f"{path} is not the segment of {num_bytes} bytes that was announced")
        return cls(fd, path, num_bytes)

    def close(self) -> None:
        """Unmap as soon as no tensor looks at the memory any more."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
