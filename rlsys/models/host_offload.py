"""Parts of a model or its trainer in host memory while other roles use the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

PINNED_BYTES = 256 << 20
"""Of a block of pinned memory: a power of two, as PyTorch rounds to one; it keeps blocks for the next copies."""


def free_device_memory() -> None:
    """Give back, on a GPU, what tensors have freed."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class HostOffload:
    """Storages whose contents are on the host, by the name of the part they belong to.

    They are restored in place: every view of a storage stays valid. `settle` is called before memory is freed.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        self._settle = settle
        self._offloaded: dict[str, list[tuple[torch.UntypedStorage, list[Tensor]]]] = {}

    def offload(self, part: str, tensors: Sequence[Tensor]) -> None:
        """Copy the memory of `tensors` to the host and free it; a part that is already there stays."""
        if part in self._offloaded:
            return
        self._settle()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._offloaded[part] = list(_copied_to_host(list(storages.values())))
        for storage in storages.values():
            storage.resize_(0)
        free_device_memory()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore every part within the block."""
        offloaded = {part: [storage for storage, _ in saved] for part, saved in self._offloaded.items()}
        for part in offloaded:
            self.restore(part)
        yield
        for part, storages in offloaded.items():
            self.offload(part, [_bytes_of(storage) for storage in storages])

    def restore(self, part: str) -> None:
        """Copy a part back to its device; a part that is not offloaded stays."""
        for storage, pieces in self._offloaded.pop(part, ()):
            storage.resize_(sum(len(piece) for piece in pieces))
            for into, piece in zip(_bytes_of(storage).split([len(piece) for piece in pieces]), pieces, strict=True):
                into.copy_(piece, non_blocking=True)


def _copied_to_host(storages: Sequence[torch.UntypedStorage]) -> Iterator[tuple[torch.UntypedStorage, list[Tensor]]]:
    """Each storage and the pieces of its copy, which are complete with the current stream's work."""
    left, room = sum(storage.nbytes() for storage in storages), torch.empty(0, dtype=torch.uint8)
    for storage in storages:
        rest, pieces = _bytes_of(storage), list[Tensor]()
        while len(rest):
            if not len(room):
                room = torch.empty(min(PINNED_BYTES, left), dtype=torch.uint8, pin_memory=rest.is_cuda)
            size = min(len(room), len(rest))
            pieces.append(room[:size].copy_(rest[:size], non_blocking=True))
            room, rest, left = room[size:], rest[size:], left - size
        yield storage, pieces


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
