"""Memory of tensors offloaded to the host and restored in place: every view of it stays valid."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class HostOffload:
    """Storages whose contents are on the host, by the name of the part they belong to."""

    def __init__(self) -> None:
        self._offloaded: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}

    def offload(self, part: str, tensors: Sequence[Tensor]) -> None:
        """Copy the memory of `tensors` to the host and free it; a part that is already there stays."""
        if part in self._offloaded:
            return
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._offloaded[part] = [(storage, _bytes_of(storage).to("cpu", copy=True)) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)
        _release()

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
        """Copy a part back to its device and free the host memory; a part that is not offloaded stays."""
        for storage, saved in self._offloaded.pop(part, ()):
            storage.resize_(saved.nbytes)
            _bytes_of(storage).copy_(saved, non_blocking=True)
        _release()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _release() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
