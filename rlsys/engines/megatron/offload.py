"""Memory of tensors taken off the accelerator and brought back, in place: every view of it stays valid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Parking:
    """Storages away from their device, by the name of the part they belong to."""

    def __init__(self) -> None:
        self._away: dict[str, list[tuple[Any, Tensor]]] = {}

    def send(self, part: str, tensors: Sequence[Tensor]) -> None:
        """Copy the memory of `tensors` to the host and free it; sending what is away does nothing."""
        if part in self._away:
            return
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._away[part] = [(storage, _bytes_of(storage).to("cpu", copy=True)) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)
        _release()

    @contextmanager
    def home(self) -> Iterator[None]:
        """Everything where it was, within the block."""
        away = {part: [storage for storage, _ in saved] for part, saved in self._away.items()}
        for part in away:
            self.fetch(part)
        yield
        for part, storages in away.items():
            self.send(part, [_bytes_of(storage) for storage in storages])

    def fetch(self, part: str) -> None:
        """Bring a part back where it was; fetching what is there does nothing."""
        for storage, saved in self._away.pop(part, ()):
            storage.resize_(saved.nbytes)
            _bytes_of(storage).copy_(saved, non_blocking=True)
        _release()


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _release() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
