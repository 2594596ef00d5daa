"""The sending executor: trainer ranks send by plan to engines anywhere, over NCCL between GPUs or gloo between CPUs.

A process group of its own joins all ranks of both sides. Copies of a link are packed into messages of bounded size; one
message of every link makes a round, so that a rank never stages more than its links' messages.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.executors.cuda_ipc import LendSpec, Published, PullSpec, arrived, check_sums, stated
from rlsys.weights.layout import device_of, dtype_of, element_bytes, view_of
from rlsys.weights.plan import Copy, Plan
from rlsys.weights.target import Moved, Target

STAGING_BYTES = 32 << 20
ALIGN_BYTES = 16
TAG = 7
LOOPBACK = "127.0.0.1"
Message = tuple[int, tuple[Copy, ...]]
"""A peer's rank on its own side, and the copies to send to it or to receive from it."""


@dataclass(frozen=True)
class Meeting:
    """Where all ranks meet: at rank 0 of the trainer; engines are numbered after the trainer's ranks."""

    address: str
    token: str
    rank: int
    world_size: int
    num_sources: int
    timeout_s: float
    one_host: bool


@dataclass(frozen=True)
class SendSpec:
    """A trainer rank's part: the messages of each round."""

    lend: LendSpec
    rounds: tuple[tuple[Message, ...], ...]
    meeting: Meeting


@dataclass(frozen=True)
class ReceiveSpec:
    """An engine's part."""

    pull: PullSpec
    rounds: tuple[tuple[Message, ...], ...]
    meeting: Meeting


def rounds_of(plan: Plan, *, staging_bytes: int = STAGING_BYTES) -> list[dict[tuple[int, int], tuple[Copy, ...]]]:
    """Messages by (source, destination) for each round; a rank's messages of one round stay below `staging_bytes`."""
    links: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        links[copy.source_rank, copy.rank].append(copy)
    busiest = max(Counter(end for a, b in links for end in (("from", a), ("to", b))).values(), default=1)
    limit = max(256, staging_bytes // busiest // ALIGN_BYTES * ALIGN_BYTES)
    queues = {link: list(_messages(copies, limit)) for link, copies in sorted(links.items())}
    return [
        {link: messages[number] for link, messages in queues.items() if number < len(messages)}
        for number in range(max(map(len, queues.values()), default=0))
    ]


def _messages(copies: Sequence[Copy], limit_bytes: int) -> Iterator[tuple[Copy, ...]]:
    message, filled = list[Copy](), 0
    for copy in chain.from_iterable(_cut(whole, limit_bytes) for whole in copies):
        if message and filled + _room(copy) > limit_bytes:
            yield tuple(message)
            message, filled = [], 0
        message.append(copy)
        filled += _room(copy)
    if message:
        yield tuple(message)


def _cut(copy: Copy, limit_bytes: int) -> Iterator[Copy]:
    """A copy in parts along its first dimension that has more than one element."""
    dim = next((d for d, n in enumerate(copy.shape) if n > 1), None)
    if copy.num_bytes <= limit_bytes or dim is None:
        yield copy
        return
    step = max(1, limit_bytes * copy.shape[dim] // copy.num_bytes)
    for at in range(0, copy.shape[dim], step):
        n = min(step, copy.shape[dim] - at)
        part = replace(
            copy,
            start=_shifted(copy.start, dim, at),
            shape=tuple(n if d == dim else size for d, size in enumerate(copy.shape)),
            source_start=_shifted(copy.source_start, dim - len(copy.shape), at),
            local_start=_shifted(copy.local_start, dim - len(copy.shape), at),
        )
        yield from _cut(part, limit_bytes)


def _shifted(start: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    moved = list(start)
    moved[dim] += by
    return tuple(moved)


def _room(copy: Copy) -> int:
    return -(-copy.num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class LostError(WeightTransferError):
    """Another rank broke off or did not come: its own error says why."""


class _Line:
    """The process group of both sides, as one rank sees it."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self._waiting = meeting, False
        self.group: Any = None
        self.store: Any = None
        self.address = meeting.address or self._open()

    def _open(self) -> str:
        """Rank 0 listens: on the loopback alone where all ranks are of one host."""
        host = LOOPBACK if self.meeting.one_host else socket.gethostname()
        listener = socket.create_server((host, 0))
        port, wait = listener.getsockname()[1], timedelta(seconds=self.meeting.timeout_s)
        self.store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
        )
        return f"{host}:{port}"

    def join(self, device: torch.device) -> None:
        """Meet all others; every rank must call it."""
        meeting, wait = self.meeting, timedelta(seconds=self.meeting.timeout_s)
        with self.guarded("join"):
            self._waiting = True
            if self.store is None:
                host, _, port = self.address.rpartition(":")
                self.store = dist.TCPStore(host, int(port), is_master=False, timeout=wait)
            store = dist.PrefixStore(meeting.token, self.store)
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = wait
                self.group = dist.ProcessGroupNCCL(store, meeting.rank, meeting.world_size, options)
            else:
                gloo: Any = dist.ProcessGroupGloo
                options, name = gloo._Options(), LOOPBACK if meeting.one_host else socket.gethostname()
                options._devices, options._timeout = [gloo.create_device(hostname=name)], wait
                self.group = gloo(store, meeting.rank, meeting.world_size, options)
            self._waiting = False

    @contextmanager
    def guarded(self, stage: str) -> Iterator[None]:
        """After any error the group is given up, so that the others learn of it; what it raises is a LostError."""
        try:
            yield
        except dist.DistError as error:
            self.close()
            raise LostError(f"weights could not be sent ({stage}): {error}") from error
        except BaseException as error:
            lost = self._waiting and isinstance(error, RuntimeError | ValueError)
            self.close()
            if lost:
                raise LostError(f"weights could not be sent ({stage}): {error}") from error
            raise

    def exchange(self, messages: Sequence[tuple[int, Tensor]], *, send: bool, device: torch.device) -> None:
        """Send to, or receive from, several ranks at once; waits for all."""
        if self.group is None:
            raise WeightTransferError("this rank has not joined the others: connect again")
        group: Any = self.group
        batched = device.type == "cuda" and len(messages) > 0
        if batched:
            group._start_coalescing(device)
        self._waiting = True
        works = [(group.send if send else group.recv)([tensor], rank, TAG) for rank, tensor in messages]
        if batched:
            works = [group._end_coalescing(device)]
        for work in works:
            work.wait()
        self._waiting = False

    def close(self) -> None:
        group, self.group, self.store = self.group, None, None
        if group is not None and hasattr(group, "abort"):
            group.abort()


class Sender:
    """A trainer rank's side."""

    def __init__(self, spec: SendSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self.line = _Line(spec.meeting)
        self.address = self.line.address

    def join(self) -> None:
        self.line.join(device_of(self.engine.local_tensors()))

    @torch.no_grad()
    def send(self, version: int) -> Published:
        started_s = time.monotonic()
        with self.line.guarded(f"version {version}"):
            tensors = self.engine.local_tensors()
            device = device_of(tensors)
            stamp = torch.tensor([version], device=device)
            for messages in self.spec.rounds:
                packed = [(self._peer(rank), self._pack(copies, tensors, device)) for rank, copies in messages]
                self.line.exchange(packed, send=True, device=device)
            everyone = range(self.spec.meeting.num_sources, self.spec.meeting.world_size)
            if self.spec.meeting.rank == 0:
                self.line.exchange([(rank, stamp) for rank in everyone], send=True, device=device)
        sums = np.array(stated(self.spec.lend, tensors)(), np.uint64)
        return Published(version, sums, time.monotonic() - started_s)

    def _peer(self, rank: int) -> int:
        return self.spec.meeting.num_sources + rank

    def _pack(self, copies: Sequence[Copy], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        if len(copies) == 1:
            only = view_of(tensors[copies[0].source_local], copies[0].source_start, copies[0].shape)
            if only.is_contiguous() and only.dtype == dtype_of(copies[0].dtype):
                return only.detach().reshape(-1).view(torch.uint8)
        buffer = torch.empty(_length(copies), dtype=torch.uint8, device=device)
        for view, copy in zip(_views(buffer, copies), copies, strict=True):
            view.copy_(view_of(tensors[copy.source_local], copy.source_start, copy.shape))
        return buffer

    def close(self) -> None:
        self.line.close()


class Receiver:
    """A rollout engine's side; the engine stays quarantined from `receive` to `finish`."""

    def __init__(self, spec: ReceiveSpec, engine: RolloutEngine) -> None:
        self.spec, self.target = spec, Target(engine)
        self.line = _Line(spec.meeting)
        self.received: int | None = None

    def join(self) -> None:
        self.line.join(device_of(self.target.tensors()))

    @torch.no_grad()
    def receive(self, version: int) -> Moved:
        started_s = time.monotonic()
        self.received = None
        with self.line.guarded(f"version {version}"):
            tensors = self.target.begin()
            device = device_of(tensors)
            stamp = torch.tensor([-1], device=device)
            for messages in self.spec.rounds:
                buffers = [torch.empty(_length(copies), dtype=torch.uint8, device=device) for _, copies in messages]
                posted = [(rank, buffer) for (rank, _), buffer in zip(messages, buffers, strict=True)]
                self.line.exchange(posted, send=False, device=device)
                for (_, copies), buffer in zip(messages, buffers, strict=True):
                    for view, copy in zip(_views(buffer, copies), copies, strict=True):
                        view_of(tensors[copy.local], copy.local_start, copy.shape).copy_(view)
            self.line.exchange([(0, stamp)], send=False, device=device)
        if int(stamp) != version:
            raise WeightTransferError(f"the trainer sent weight version {int(stamp)} instead of {version}")
        self.received = version
        num_bytes = sum(copy.num_bytes for copy in self.spec.pull.copies)
        return Moved(version, num_bytes, time.monotonic() - started_s, "")

    def finish(self, version: int, sums: Any) -> None:
        if self.received != version:
            raise WeightTransferError(f"this engine has not received weight version {version}")
        check_sums(self.spec.pull, arrived(self.spec.pull, self.target.tensors())(), sums)
        self.target.finish(version)

    def close(self) -> None:
        self.line.close()


def _length(copies: Sequence[Copy]) -> int:
    return copies[0].num_bytes if len(copies) == 1 else sum(map(_room, copies))


def _views(buffer: Tensor, copies: Sequence[Copy]) -> Iterator[Tensor]:
    at = 0
    for copy in copies:
        count = prod(copy.shape) * element_bytes(copy.dtype)
        yield buffer[at : at + count].view(dtype_of(copy.dtype)).view(copy.shape)
        at += _room(copy)
