"""The trainer's side of weights for external servers: rank 0 broadcasts to one process group with each server.

Gathering is collective over the trainer's ranks. A server that fails leaves its own group only.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rlsys.interfaces import TrainEngine
from rlsys.ipc.process_group import ProcessGroup, Rendezvous, address_towards, server_token
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.layout import device_of

JOIN_S = 5.0
"""How much later than a server the trainer may find that they have met."""


@dataclass(frozen=True)
class BroadcastSpec:
    """The number of ranks of each server by its URL; `rank` is the trainer's."""

    servers: Mapping[str, int]
    bucket_bytes: int
    timeout_s: float
    rank: int = -1


@dataclass(frozen=True)
class ServerGroup:
    """What a server is given to join its group: the store's address, the group's name and backend."""

    address: str
    name: str
    backend: str
    world_size: int


@dataclass(frozen=True)
class SentBucket:
    """The tensors that are being broadcast, and why servers were `lost` before by their URLs."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    lost: Mapping[str, str]


class Broadcaster:
    """A trainer rank."""

    def __init__(self, spec: BroadcastSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self.device = device_of(engine.local_tensors())
        self.groups: dict[str, ProcessGroup] = {}
        self.address: dict[str, ServerGroup] = {}
        self._unfinished: dict[str, Callable[[], object]] = {}
        self._lost: dict[str, str] = {}
        self._buckets: Iterator[list[tuple[str, Tensor]]] = iter(())
        for url, num_ranks in spec.servers.items() if spec.rank == 0 else ():
            name, host = secrets.token_hex(8), address_towards(urlsplit(url).hostname or "")
            token, world_size = server_token(name, self.device.type), 1 + num_ranks
            group = ProcessGroup(Rendezvous("", token, 0, world_size, spec.timeout_s, host))
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            self.groups[url], self.address[url] = group, ServerGroup(group.address, name, backend, world_size)

    def join(self) -> None:
        """Begin to form the groups; each waits for its server."""
        for url, group in self.groups.items():
            joined = in_daemon_thread(partial(group.join, self.device), name=f"join {url}")
            self._unfinished[url] = partial(joined.result, JOIN_S)

    def send(self, version: int) -> None:
        """Start again from the first bucket."""
        self._buckets = self.engine.exported(self.spec.bucket_bytes)

    @torch.no_grad()
    def bucket(self, lost: Sequence[str]) -> SentBucket | bool:
        """Rank 0: the next bucket, on its way to all servers but the lost ones; other ranks: True; False at the end.

        To be called when each server has reported the bucket before, or is lost.
        """
        for url in lost:
            self._leave(url, "")
        for url, finish in self._unfinished.items():
            self._try(url, finish)
        self._unfinished = {}
        gathered = next(self._buckets, None)
        if gathered is None or self.spec.rank:
            return gathered is not None
        tensors = {name: tensor.to(self.device).contiguous() for name, tensor in gathered}
        for url, group in [*self.groups.items()]:
            if works := self._try(url, partial(group.broadcast, [*tensors.values()])):
                self._unfinished[url] = partial(_wait, works, tensors)
        causes, self._lost = self._lost, {}
        shapes, num_bytes = tuple(tuple(t.shape) for t in tensors.values()), sum(t.nbytes for t in tensors.values())
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
        return SentBucket(tuple(tensors), dtypes, shapes, num_bytes, causes)

    def _try(self, url: str, act: Callable[[], object]) -> Any:
        """Act for a server that is still in its group; one that fails is lost."""
        if url in self.groups:
            try:
                return act()
            except (RuntimeError, TimeoutError, WeightTransferError) as error:
                self._leave(url, f"its process group failed: {error}")
        return None

    def _leave(self, url: str, cause: str) -> None:
        if (group := self.groups.pop(url, None)) is not None:
            group.close()
            self._lost |= {url: cause} if cause else {}

    def close(self) -> None:
        for url in [*self.groups]:
            self._leave(url, "")


def _wait(works: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
    """Wait for works, and keep what they send until then."""
    for work in works:
        work.wait()
