"""The sending executor: trainer ranks send to engines on any host, over NCCL between GPUs or gloo between CPUs.

One process group joins all ranks of both sides. The copies between two ranks are packed into messages of bounded size;
a round is one message for every pair of ranks, so that no rank stages more than the messages of one round.
"""

import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.ipc.process_group import LOOPBACK, PeerLostError, ProcessGroup, Rendezvous
from rlsys.utils.boxes import buckets
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.executors.base import Executor, Layouts, RankFuture, RemainingTime
from rlsys.weights.layout import device_of, dtype_of, element_bytes, view_of
from rlsys.weights.plan import Copy, Plan, make_plan
from rlsys.weights.rank_plan import (
    DestinationPlan,
    PlanReceiver,
    RankPlans,
    SourcePlan,
    source_checksums,
    split_plan,
)

STAGING_BYTES = 32 << 20
ALIGN_BYTES = 16
Link = tuple[int, int]
"""A trainer rank and a rollout rank."""
Message = tuple[int, tuple[Copy, ...]]
"""A peer's rank on its own side, and the copies to send to it or to receive from it."""


@dataclass(frozen=True)
class NcclSendSpec:
    """A trainer rank's part: the messages of each round."""

    plan: SourcePlan
    rounds: tuple[tuple[Message, ...], ...]
    rendezvous: Rendezvous


@dataclass(frozen=True)
class NcclReceiveSpec:
    """An engine's part."""

    plan: DestinationPlan
    rounds: tuple[tuple[Message, ...], ...]
    rendezvous: Rendezvous


def plan_rounds(plan: Plan, *, staging_bytes: int = STAGING_BYTES) -> list[dict[Link, tuple[Copy, ...]]]:
    """The messages of each round by link; a rank's messages of one round stay below `staging_bytes`."""
    links: dict[Link, list[Copy]] = defaultdict(list)
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
    parts = chain.from_iterable(_split(copy, limit_bytes) for copy in copies)
    yield from map(tuple, buckets({copy: _padded_bytes(copy) for copy in parts}, limit_bytes))


def _split(copy: Copy, limit_bytes: int) -> Iterator[Copy]:
    """A copy in parts of bounded size, along its first dimension that has more than one element."""
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
        yield from _split(part, limit_bytes)


def _shifted(start: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    moved = list(start)
    moved[dim] += by
    return tuple(moved)


def _padded_bytes(copy: Copy) -> int:
    return -(-copy.num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class NcclSender:
    """A trainer rank."""

    def __init__(self, spec: NcclSendSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self.group = ProcessGroup(spec.rendezvous)
        self.address = self.group.address

    def join(self) -> None:
        self.group.join(device_of(self.engine.local_tensors()))

    @torch.no_grad()
    def send(self, version: int) -> np.ndarray:
        """Send all rounds; returns this rank's checksums."""
        with self.group.guarded(f"version {version}"):
            tensors = self.engine.local_tensors()
            device = device_of(tensors)
            stamp = torch.tensor([version], device=device)
            engines = range(self.spec.rendezvous.num_sources, self.spec.rendezvous.world_size)
            for messages in self.spec.rounds:
                packed = [(engines[rank], self._pack(copies, tensors, device)) for rank, copies in messages]
                self.group.exchange(packed, send=True, device=device)
            if self.spec.rendezvous.rank == 0:
                self.group.exchange([(rank, stamp) for rank in engines], send=True, device=device)
        return np.array(source_checksums(self.spec.plan, tensors)(), np.uint64)

    def _pack(self, copies: Sequence[Copy], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        if len(copies) == 1:
            only = view_of(tensors[copies[0].source_local], copies[0].source_start, copies[0].shape)
            if only.is_contiguous() and only.dtype == dtype_of(copies[0].dtype):
                return only.detach().reshape(-1).view(torch.uint8)
        buffer = torch.empty(_packed_bytes(copies), dtype=torch.uint8, device=device)
        for view, copy in zip(_unpacked(buffer, copies), copies, strict=True):
            view.copy_(view_of(tensors[copy.source_local], copy.source_start, copy.shape))
        return buffer

    def close(self) -> None:
        self.group.close()


class NcclReceiver(PlanReceiver):
    """A rollout rank."""

    def __init__(self, spec: NcclReceiveSpec, engine: RolloutEngine) -> None:
        super().__init__(spec.plan, engine)
        self.rounds, self.group = spec.rounds, ProcessGroup(spec.rendezvous)

    def join(self) -> None:
        self.group.join(device_of(self.update.tensors()))

    @torch.no_grad()
    def receive(self, version: int) -> int:
        self.received = self.checksums = None
        with self.group.guarded(f"version {version}"):
            tensors = self.update.begin()
            device = device_of(tensors)
            stamp = torch.tensor([-1], device=device)
            for messages in self.rounds:
                sizes = [_packed_bytes(copies) for _, copies in messages]
                buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
                posted = [(rank, buffer) for (rank, _), buffer in zip(messages, buffers, strict=True)]
                self.group.exchange(posted, send=False, device=device)
                for (_, copies), buffer in zip(messages, buffers, strict=True):
                    for view, copy in zip(_unpacked(buffer, copies), copies, strict=True):
                        view_of(tensors[copy.local], copy.local_start, copy.shape).copy_(view)
            self.group.exchange([(0, stamp)], send=False, device=device)
        if int(stamp) != version:
            raise WeightTransferError(f"the trainer sent weight version {int(stamp)} instead of {version}")
        self.received = version
        return sum(copy.num_bytes for copy in self.plan.copies)

    def close(self) -> None:
        self.group.close()


def _packed_bytes(copies: Sequence[Copy]) -> int:
    return copies[0].num_bytes if len(copies) == 1 else sum(map(_padded_bytes, copies))


def _unpacked(buffer: Tensor, copies: Sequence[Copy]) -> Iterator[Tensor]:
    at = 0
    for copy in copies:
        count = prod(copy.shape) * element_bytes(copy.dtype)
        yield buffer[at : at + count].view(dtype_of(copy.dtype)).view(copy.shape)
        at += _padded_bytes(copy)


class NcclExecutor(Executor):
    """`nccl`: messages over a process group of both sides."""

    plans: RankPlans
    joined = False

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        plan = make_plan(sources, destinations)
        self.plans, self.unused = split_plan(plan, sources), plan.unused
        self.rounds = plan_rounds(plan)
        hosts = {layout.host for layout in (*sources, *destinations)}
        self.listen_at = LOOPBACK if len(hosts) == 1 else ""
        self._join(remaining_s)

    def push(self, version: int, remaining_s: RemainingTime) -> tuple[int, str]:
        if not self.joined:
            self._join(remaining_s)
        self.joined = False
        sent = self.source.execute_all_async("send_weights", version)
        received = self.destination.execute_all_async("receive_weights", version)
        results = _wait_for_peers([*sent, *received], remaining_s)
        checksums = self.plans.merge(results[: len(sent)])
        self.step(self.destination, remaining_s, "finish", version, checksums)
        self.joined = True
        return sum(results[len(sent) :]), self.plans.digest(checksums)

    def _join(self, remaining_s: RemainingTime) -> None:
        """Form a new process group of all ranks, at first and after a failure."""
        num_sources = self.source.world_size
        world_size = num_sources + self.destination.world_size
        created = Rendezvous(
            "", secrets.token_hex(8), 0, world_size, num_sources, self.options.timeout_s, self.listen_at
        )
        there = replace(created, address=self.open(self.source, [self._spec(created)], remaining_s)[0])
        specs = [self._spec(replace(there, rank=rank)) for rank in range(world_size)]
        self.open(self.source, specs[1:num_sources], remaining_s, first_rank=1)
        self.open(self.destination, specs[num_sources:], remaining_s)
        joins = [group.execute_all_async("weight_step", "join") for group in (self.source, self.destination)]
        _wait_for_peers([*chain.from_iterable(joins)], remaining_s)
        self.joined = True

    def _spec(self, rendezvous: Rendezvous) -> NcclSendSpec | NcclReceiveSpec:
        """The part of one rank of the process group."""
        engine = rendezvous.rank - rendezvous.num_sources
        side, rank = (0, rendezvous.rank) if engine < 0 else (1, engine)
        rounds = tuple(
            tuple((link[1 - side], copies) for link, copies in messages.items() if link[side] == rank)
            for messages in self.rounds
        )
        if side == 0:
            return NcclSendSpec(self.plans.sources[rank], rounds, rendezvous)
        return NcclReceiveSpec(self.plans.destination(rank), rounds, rendezvous)


def _wait_for_peers(futures: Sequence[RankFuture], remaining_s: RemainingTime) -> list[Any]:
    """The results of ranks that work together; of their errors the first that is not only about a lost peer."""
    results, errors = list[object](), list[Exception]()
    for future in futures:
        try:
            results.append(future.get(remaining_s()))
        except Exception as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
    return results
