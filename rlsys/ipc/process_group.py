"""A process group between trainer and rollout ranks that belong to no common one: NCCL on GPUs, gloo on CPUs.

Used by vLLM servers too (rlsys/rollout/vllm/server.py), so it needs nothing but torch.
"""

import ctypes
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.utils.environment import environment
from rlsys.utils.errors import WeightTransferError

LOOPBACK = "127.0.0.1"
TAG = 7
OUTLIVES_PEERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1"}
"""How NCCL's group is made: where a peer is lost it ends what waits for it, at once, but not this process."""
Messages = Sequence[tuple[int, Tensor]]
"""Tensors to send to ranks, or to receive from them."""


@dataclass(frozen=True)
class Rendezvous:
    """Where all ranks meet: at rank 0 of the trainer; engines are numbered after the trainer's ranks.

    `token` begins all keys of the group in the store. `host` is where this rank listens, empty for its address on the
    route to MASTER_ADDR: another host may not know the name of this one, or know it as one of its own addresses.
    """

    address: str
    token: str
    rank: int
    world_size: int
    timeout_s: float
    host: str


def address_towards(peer: str) -> str:
    """This machine's address on the route to another host."""
    family, *_, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def own_address() -> str:
    """This machine's address on the route to MASTER_ADDR, else the one of its name: others may not know its name."""
    return address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname())


def server_token(name: str, device: str) -> str:
    """The token with which a group meets one that a server made as torch's subgroup `name`, as SGLang does."""
    return f"{name}/{name}//{device}/"


class PeerLostError(WeightTransferError):
    """Another rank failed or did not join; the cause is in its own error."""


class ProcessGroup:
    """One rank of the process group of both sides."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        host = rendezvous.host or own_address()
        self.rendezvous, self._waiting = replace(rendezvous, host=host), False
        self.group: Any = None
        self._works: list[Any] = []
        self.store: dist.TCPStore | None = None
        self.address = rendezvous.address or self._open()

    def _open(self) -> str:
        """Rank 0 opens the store."""
        host = self.rendezvous.host
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port, wait = listener.getsockname()[1], timedelta(seconds=self.rendezvous.timeout_s)
        self.store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
        )
        return f"{host}:{port}"

    def join(self, device: torch.device) -> None:
        """Form the process group; every rank must call it."""
        rendezvous, wait = self.rendezvous, timedelta(seconds=self.rendezvous.timeout_s)
        with self.guarded("join"):
            self._waiting = True
            if self.store is None:
                host, _, port = self.address.rpartition(":")
                self.store = dist.TCPStore(host, int(port), is_master=False, timeout=wait)
            store = dist.PrefixStore(rendezvous.token, self.store)
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = wait
                with environment(OUTLIVES_PEERS):
                    self.group = dist.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.world_size, options)
            else:
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._devices, options._timeout = [gloo.create_device(hostname=rendezvous.host)], wait
                self.group = gloo(store, rendezvous.rank, rendezvous.world_size, options)
            self._waiting = False

    @contextmanager
    def guarded(self, stage: str) -> Iterator[None]:
        """Abort the group after any error, so that peers fail too; an error of the group becomes a PeerLostError.

        gloo closes its connections when the last reference to the group is gone. An error that is kept holds those of
        its frames, which are cleared here, and of functions that close over a local: write `self.group` in
        comprehensions.
        """
        try:
            yield
        except BaseException as error:
            is_lost = isinstance(error, (RuntimeError, ValueError) if self._waiting else dist.DistError)
            traceback.clear_frames(error.__traceback__)
            self.close()
            if is_lost:
                raise PeerLostError(f"weight transfer lost a peer ({stage}): {error}") from error
            raise

    def exchange(self, device: torch.device, *, sends: Messages = (), receives: Messages = ()) -> None:
        """Send to and receive from several ranks at once, and wait for all of them."""
        if self.group is None:
            raise WeightTransferError("this rank has not joined the process group: connect again")
        batched = device.type == "cuda" and len(sends) + len(receives) > 0
        if batched:
            self.group._start_coalescing()
        self._waiting = True
        works = [self.group.send([tensor], rank, TAG) for rank, tensor in sends]
        works += [self.group.recv([tensor], rank, TAG) for rank, tensor in receives]
        if batched:
            works = [self.group._end_coalescing()]
        for work in works:
            work.wait()
        self._waiting = False

    def broadcast(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Start to broadcast from rank 0; returns works to wait for, during which the tensors must stay as they are."""
        if self.group is None:
            raise PeerLostError("this rank has left the process group")
        self._works = [self.group.broadcast([tensor], dist.BroadcastOptions()) for tensor in tensors]
        return self._works

    def close(self) -> None:
        """Leave the group. One of gloo with unfinished broadcasts is never freed: that would wait for them."""
        group, self.group, self.store = self.group, None, None
        if group is not None:
            group.abort()
            if not all(work.is_completed() for work in self._works):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._works = []
