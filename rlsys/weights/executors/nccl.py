"""The sending executor: trainer ranks send to engines on any host, over NCCL between GPUs or gloo between CPUs.

One process group joins all ranks of both sides. The copies between two ranks are packed into messages of bounded size;
a round is one message for every pair of ranks, so that no rank stages more than the messages of one round.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.ipc.process_group import LOOPBACK, PeerLostError, ProcessGroup, Rendezvous
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.grouping import buckets, group_by
from rlsys.weights.executors.base import Executor, Layouts, RankFuture, RemainingTime, WeightGroup
from rlsys.weights.layout import device_of, dtype_of
from rlsys.weights.plan import Copy, make_plan
from rlsys.weights.rank_plan import PlanReceiver, RankPlan, RankPlans, source_checksums, split_plan

STAGING_BYTES = 128 << 20
JOIN_POLL_S = 0.5
ALIGN_BYTES = 16
Round = Mapping[tuple[int, int], tuple[Copy, ...]]
"""The messages of a round, by the rank of the process group that sends and the one that receives: copies, packed one
after the other."""
Message = tuple[int, tuple[Copy, ...]]
"""A peer's rank in the process group, and the copies to send to it or to receive from it."""
Rounds = Sequence[Sequence[Message]]
"""The messages of one rank by round."""


@dataclass(frozen=True)
class NcclSpec:
    """A rank's part, and the messages of each round that it sends or receives."""

    plan: RankPlan
    rounds: tuple[tuple[Message, ...], ...]


class NcclSendSpec(NcclSpec):
    """That of a rank that sends."""


def plan_rounds(copies: Sequence[Copy], *, staging_bytes: int = STAGING_BYTES) -> list[Round]:
    """The messages of each round by link; a rank's messages of one round stay below `staging_bytes`.

    All messages have one limit, by which the rank with most links stages no more than that.
    """
    links = group_by(copies, lambda copy: (copy.source_rank, copy.rank))
    busiest = max(Counter(end for a, b in links for end in (("from", a), ("to", b))).values(), default=1)
    limit = max(256, staging_bytes // busiest // ALIGN_BYTES * ALIGN_BYTES)
    queues = {link: list(_messages(link_copies, limit)) for link, link_copies in sorted(links.items())}
    return [
        {link: messages[number] for link, messages in queues.items() if number < len(messages)}
        for number in range(max(map(len, queues.values()), default=0))
    ]


def _messages(copies: Sequence[Copy], limit_bytes: int) -> Iterator[tuple[Copy, ...]]:
    parts = chain.from_iterable(_split(copy, limit_bytes) for copy in copies)
    yield from map(tuple, buckets({copy: padded_bytes(copy) for copy in parts}, limit_bytes))


def messages_of(rounds: Sequence[Round], side: int, ranks: Iterable[int]) -> list[tuple[tuple[Message, ...], ...]]:
    """The messages of each round that each of these ranks sends (side 0) or receives (side 1)."""
    made: dict[int, list[list[Message]]] = {rank: [[] for _ in rounds] for rank in ranks}
    for number, each in enumerate(rounds):
        for link, part in each.items():
            if link[side] in made:
                made[link[side]][number].append((link[1 - side], part))
    return [tuple(map(tuple, of_rank)) for of_rank in made.values()]


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
    return (*start[:dim], start[dim] + by, *start[dim:][1:])


def padded_bytes(copy: Copy) -> int:
    """The bytes of a copy among others in a message."""
    return -(-copy.num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class GroupMember:
    """A rank of a process group, which is formed again after a failure, and its messages of each round.

    `_slots` are the places of each round's received messages in memory that all rounds share.
    """

    group: ProcessGroup

    def __init__(self, sends: Rounds = (), receives: Rounds = ()) -> None:
        self.sends, self.receives, self.device = sends, receives, torch.device("cpu")
        self._slots: list[Sequence[Tensor]] = []

    def listen(self, rendezvous: Rendezvous) -> str:
        """Leave an earlier group; returns where rank 0 meets the others."""
        GroupMember.close(self)
        self.group = ProcessGroup(rendezvous)
        return self.group.address

    def join(self, rendezvous: Rendezvous) -> None:
        """Begin to join the others."""
        if rendezvous.rank:
            self.listen(rendezvous)
        self._joining = in_daemon_thread(partial(self.group.join, self.device), name="join")

    def has_joined(self) -> bool:
        """Whether all ranks have met; waits a moment for it."""
        wait([self._joining], JOIN_POLL_S)
        return self._joining.done() and self._joining.result() is None

    def allocate(self, device: torch.device) -> None:
        """Allocate the memory that all rounds receive into."""
        sizes = [[sum(map(padded_bytes, copies)) for _, copies in messages] for messages in self.receives]
        memory = torch.empty(max(map(sum, sizes), default=0), dtype=torch.uint8, device=device)
        self.device, self._slots = device, [memory[: sum(of_round)].split(of_round) for of_round in sizes]

    def exchange(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Send the messages of a round out of this rank's tensors, and receive its others."""
        slots = zip(self.receives[number], self._slots[number], strict=True) if self.receives else ()
        sends = self.sends[number] if self.sends else ()
        self.group.exchange(
            self.device,
            sends=[(rank, pack(copies, tensors, self.device)) for rank, copies in sends],
            receives=[(rank, slot[: packed_bytes(copies)]) for (rank, copies), slot in slots],
        )

    def received_in(self, number: int) -> Iterator[tuple[Copy, Tensor]]:
        """What a round brings, and where."""
        for (_, copies), slot in zip(self.receives[number], self._slots[number], strict=True):
            yield from zip(copies, unpacked(slot, copies), strict=True)

    def close(self) -> None:
        if "group" in vars(self):
            self.group.close()


class NcclSender(GroupMember):
    """A trainer rank."""

    def __init__(self, spec: NcclSpec, engine: TrainEngine) -> None:
        super().__init__(sends=spec.rounds)
        self.spec, self.engine, self.device = spec, engine, device_of(engine.local_tensors())

    @torch.no_grad()
    def send(self, version: int) -> np.ndarray:
        """Send all rounds; returns this rank's checksums."""
        with self.group.guarded(f"version {version}"):
            tensors = self.engine.local_tensors()
            for number in range(len(self.sends)):
                self.exchange(number, tensors)
        return np.array(source_checksums(self.spec.plan, tensors)(), np.uint64)


class NcclReceiver(PlanReceiver, GroupMember):
    """A rollout rank."""

    def __init__(self, spec: NcclSpec, engine: RolloutEngine) -> None:
        PlanReceiver.__init__(self, spec.plan, engine)
        GroupMember.__init__(self, receives=spec.rounds)
        self.device = device_of(self.update.tensors())

    @torch.no_grad()
    def receive(self, version: int) -> int:
        self.received = self.checksums = None
        with self.group.guarded(f"version {version}"):
            tensors = self.update.begin()
            self.allocate(self.device)
            for number in range(len(self.receives)):
                self.exchange(number, {})
                for copy, values in self.received_in(number):
                    copy.view(tensors).copy_(values)
            self._slots = []
        self.received = version
        return sum(copy.num_bytes for copy in self.plan.copies)


def pack(copies: Sequence[Copy], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The message of some copies out of a rank's tensors, as bytes."""
    if len(copies) == 1:
        only = copies[0].source_view(tensors)
        if only.is_contiguous() and only.dtype == dtype_of(copies[0].dtype):
            return only.detach().reshape(-1).view(torch.uint8)
    buffer = torch.empty(packed_bytes(copies), dtype=torch.uint8, device=device)
    for view, copy in zip(unpacked(buffer, copies), copies, strict=True):
        view.copy_(copy.source_view(tensors))
    return buffer


def packed_bytes(copies: Sequence[Copy]) -> int:
    """The bytes of a message."""
    return copies[0].num_bytes if len(copies) == 1 else sum(map(padded_bytes, copies))


def unpacked(buffer: Tensor, copies: Sequence[Copy]) -> Iterator[Tensor]:
    """The values of each copy in a message."""
    at = 0
    for copy in copies:
        yield buffer[at : at + copy.num_bytes].view(dtype_of(copy.dtype)).view(copy.shape)
        at += padded_bytes(copy)


class NcclExecutor(Executor):
    """`nccl`: messages over a process group of both sides."""

    plans: RankPlans
    joined = False

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        plan = make_plan(sources, destinations)
        self.plans, self.unused = split_plan(plan, sources), plan.unused
        first = len(sources)  # engines come after the trainer's ranks
        rounds = plan_rounds([replace(copy, rank=first + copy.rank) for copy in plan.copies])
        sent = messages_of(rounds, 0, range(first))
        received = messages_of(rounds, 1, range(first, first + self.destination.world_size))
        sends = [NcclSendSpec(part, given) for part, given in zip(self.plans.sources, sent, strict=True)]
        receives = [NcclSpec(self.plans.destination(rank), taken) for rank, taken in enumerate(received)]
        self.open(self.source, sends, remaining_s)
        self.open(self.destination, receives, remaining_s)
        self.listen_at = LOOPBACK if len({layout.host for layout in (*sources, *destinations)}) == 1 else ""

    def push(self, version: int, remaining_s: RemainingTime) -> tuple[int, str]:
        if not self.joined:
            form_group((self.source, self.destination), self.options.timeout_s, remaining_s, host=self.listen_at)
        self.joined = False
        sent = self.source.execute_all_async("send_weights", version)
        results = wait_for_peers([*sent, *self.destination.execute_all_async("receive_weights", version)], remaining_s)
        checksums = self.plans.merge(results[: len(sent)])
        self.step(self.destination, remaining_s, "finish", version, checksums)
        self.joined = True
        return sum(results[len(sent) :]), self.plans.digest(checksums)


def form_group(groups: Sequence[WeightGroup], timeout_s: float, remaining_s: RemainingTime, *, host: str = "") -> None:
    """Form a new process group of all ranks of some groups, at first and after a failure.

    They wait for each other half of `timeout_s`, so that those that miss a peer answer before it is over; they can be
    asked meanwhile, so that one that dies is known at once.
    """
    ranks = [(group, rank) for group in groups for rank in range(group.world_size)]
    met = Rendezvous("", secrets.token_hex(8), 0, len(ranks), timeout_s / 2, host)
    met = replace(met, address=groups[0].execute_rank_async(0, "weight_step", "listen", met).get(remaining_s()))
    joins = [
        group.execute_rank_async(rank, "weight_step", "join", replace(met, rank=number))
        for number, (group, rank) in enumerate(ranks)
    ]
    wait_for_peers(joins, remaining_s)
    has_joined = [False]
    while not all(has_joined):
        asked = [call for group in groups for call in group.execute_all_async("weight_step", "has_joined")]
        has_joined = wait_for_peers(asked, remaining_s)


def wait_for_peers(futures: Sequence[RankFuture], remaining_s: RemainingTime) -> list[Any]:
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
