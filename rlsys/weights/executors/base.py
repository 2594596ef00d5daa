"""The controller's part of every executor: what is asked of which ranks, in which order, for one push.

An exchange has `connect(sources, destinations, left_s)`, `push(version, left_s) -> [Moved]` and
`restore(rank, version, left_s)`; layouts are numbered by the ranks of their groups, `left_s()` are the seconds left.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import add_up, digest
from rlsys.weights.executors.cuda_ipc import Published, PullPlan, plan_pull
from rlsys.weights.executors.disk import DiskSpec, plan_disk
from rlsys.weights.executors.endpoints import Answer, WeightGroup
from rlsys.weights.executors.gather import GatherSpec
from rlsys.weights.executors.handles import Offer
from rlsys.weights.executors.nccl import LostError, Meeting, ReceiveSpec, SendSpec, rounds_of
from rlsys.weights.executors.shm import Moved, ShmPlan, plan_shm
from rlsys.weights.plan import make_plan, resolve_names

Left = Callable[[], float]
Layouts = Sequence[WeightLayout]


class Exchange(Protocol):
    """One executor between two groups."""

    unused: tuple[str, ...]

    def connect(self, sources: Layouts, destinations: Layouts, left_s: Left) -> None: ...
    def push(self, version: int, left_s: Left) -> list[Moved]: ...
    def restore(self, rank: int, version: int, left_s: Left) -> None: ...


def all_of(answers: Sequence[Answer], left_s: Left) -> list[Any]:
    return [answer.get(left_s()) for answer in answers]


def first_cause(answers: Sequence[Answer], left_s: Left) -> list[Any]:
    """All answers of ranks that work together; of their errors the first that is not only about another rank's."""
    found, errors = list[Any](), list[Exception]()
    for answer in answers:
        try:
            found.append(answer.get(left_s()))
        except Exception as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, LostError)), errors[0])
    return found


class _Pair:
    """The two groups."""

    unused: tuple[str, ...] = ()

    def __init__(self, source: WeightGroup, destination: WeightGroup, *, timeout_s: float) -> None:
        self.source, self.destination, self.timeout_s = source, destination, timeout_s

    def open(self, group: WeightGroup, specs: Sequence[Any], left_s: Left, *, first: int = 0) -> list[Any]:
        """Let every rank from `first` on join with its spec."""
        asked = [group.execute_rank_async(first + n, "open_weight_transfer", spec) for n, spec in enumerate(specs)]
        return all_of(asked, left_s)

    def step(self, group: WeightGroup, left_s: Left, step: str, *args: Any) -> list[Any]:
        return all_of(group.execute_all_async("weight_step", step, *args), left_s)

    def send(self, version: int, left_s: Left) -> list[Any]:
        return all_of(self.source.execute_all_async("send_weights", version), left_s)

    def receive(self, version: int, left_s: Left, *news: Any) -> list[Moved]:
        return all_of(self.destination.execute_all_async("receive_weights", version, *news), left_s)

    def restore(self, rank: int, version: int, left_s: Left) -> None:
        raise WeightTransferError(f"rollout rank {rank} cannot be restored by this executor: push again")

    def reread(self, rank: int, version: int, spec: Any, left_s: Left) -> None:
        """Let one rollout rank join and take what still lies there."""
        self.open(self.destination, [spec], left_s, first=rank)
        self.destination.execute_rank_async(rank, "receive_weights", version).get(left_s())


class ShmExchange(_Pair):
    """Trainer ranks write an image in shared memory, engines read it."""

    plan: ShmPlan

    def connect(self, sources: Layouts, destinations: Layouts, left_s: Left) -> None:
        plan = plan_shm(sources, destinations)
        self.unused = plan.unused
        self.plan = plan.at(self.open(self.source, plan.writers[:1], left_s)[0])
        self.open(self.source, self.plan.writers[1:], left_s, first=1)
        self.open(self.destination, [self.plan.reader] * self.destination.world_size, left_s)

    def push(self, version: int, left_s: Left) -> list[Moved]:
        self.send(version, left_s)
        return self.receive(version, left_s)

    def restore(self, rank: int, version: int, left_s: Left) -> None:
        self.reread(rank, version, self.plan.reader, left_s)


class DiskExchange(_Pair):
    """A committed directory of safetensors for each version."""

    def __init__(
        self,
        source: WeightGroup,
        destination: WeightGroup,
        *,
        timeout_s: float,
        root: str | Path,
        assets: str | Path = "",
    ) -> None:
        super().__init__(source, destination, timeout_s=timeout_s)
        self.root, self.assets = str(root), str(assets)
        self.reader: DiskSpec

    def connect(self, sources: Layouts, destinations: Layouts, left_s: Left) -> None:
        writers, self.reader = plan_disk(sources, destinations, root=self.root, assets=self.assets)
        self.open(self.source, writers, left_s)
        self.open(self.destination, [self.reader] * self.destination.world_size, left_s)

    def push(self, version: int, left_s: Left) -> list[Moved]:
        first = self.source.execute_rank_async
        first(0, "weight_step", "prepare", version).get(left_s())
        parts = self.send(version, left_s)
        names = {name for part in parts for name in part.sums}
        sums = {name: add_up([part.sums.get(name, 0) for part in parts]) for name in names}
        first(0, "weight_step", "commit", version, sums).get(left_s())
        return self.receive(version, left_s)

    def restore(self, rank: int, version: int, left_s: Left) -> None:
        self.reread(rank, version, self.reader, left_s)


class PullExchange(_Pair):
    """Engines copy out of the trainer ranks' own memory."""

    pull: PullPlan
    sums: np.ndarray

    def connect(self, sources: Layouts, destinations: Layouts, left_s: Left) -> None:
        if len(hosts := {layout.host for layout in (*sources, *destinations)}) > 1:
            raise WeightTransferError(f"memory is lent on one host only, trainer and rollout are on {sorted(hosts)}")
        self.pull = plan_pull(make_plan(sources, destinations), sources)
        self.unused = self.pull.plan.unused
        self.offers: dict[int, Offer] = dict(enumerate(self.open(self.source, self.pull.lenders, left_s)))
        readers = [self.pull.reader(rank, self.offers) for rank in range(self.destination.world_size)]
        self.open(self.destination, readers, left_s)

    def push(self, version: int, left_s: Left) -> list[Moved]:
        published: list[Published] = self.send(version, left_s)
        moved = {rank: part.offer for rank, part in enumerate(published) if part.offer is not None}
        self.offers |= moved
        self.sums = self.pull.merged(published)
        parts = self.receive(version, left_s, moved)
        self.step(self.source, left_s, "confirm", version)
        self.step(self.destination, left_s, "finish", version, self.sums)
        checksum = self.pull.digest(self.sums)
        return [replace(part, checksum=checksum) for part in parts]

    def restore(self, rank: int, version: int, left_s: Left) -> None:
        """As long as the trainer has not stepped; its checksums tell."""
        self.reread(rank, version, self.pull.reader(rank, self.offers), left_s)
        self.destination.execute_rank_async(rank, "weight_step", "finish", version, self.sums).get(left_s())


class NcclExchange(_Pair):
    """Trainer ranks send to the engines through a process group of both."""

    pull: PullPlan
    joined = False

    def connect(self, sources: Layouts, destinations: Layouts, left_s: Left) -> None:
        plan = make_plan(sources, destinations)
        self.pull, self.unused = plan_pull(plan, sources), plan.unused
        self.rounds = rounds_of(plan)
        self.one_host = len({layout.host for layout in (*sources, *destinations)}) == 1
        self._join(left_s)

    def push(self, version: int, left_s: Left) -> list[Moved]:
        if not self.joined:
            self._join(left_s)
        self.joined = False
        sent = self.source.execute_all_async("send_weights", version)
        received = self.destination.execute_all_async("receive_weights", version)
        found = first_cause([*sent, *received], left_s)
        published: list[Published] = found[: len(sent)]
        parts: list[Moved] = found[len(sent) :]
        sums = self.pull.merged(published)
        self.step(self.destination, left_s, "finish", version, sums)
        self.joined = True
        checksum = self.pull.digest(sums)
        return [replace(part, checksum=checksum) for part in parts]

    def _join(self, left_s: Left) -> None:
        """A new group of all ranks; after a failure, too."""
        num_sources, num_engines = self.source.world_size, self.destination.world_size
        world = num_sources + num_engines
        here = Meeting("", secrets.token_hex(8), 0, world, num_sources, self.timeout_s, self.one_host)
        lend = self.pull.lenders

        def send_spec(rank: int, meeting: Meeting) -> SendSpec:
            rounds = tuple(
                tuple((link[1], copies) for link, copies in messages.items() if link[0] == rank)
                for messages in self.rounds
            )
            return SendSpec(lend[rank], rounds, replace(meeting, rank=rank))

        def receive_spec(rank: int, meeting: Meeting) -> ReceiveSpec:
            rounds = tuple(
                tuple((link[0], copies) for link, copies in messages.items() if link[1] == rank)
                for messages in self.rounds
            )
            return ReceiveSpec(self.pull.reader(rank, {}), rounds, replace(meeting, rank=num_sources + rank))

        there = replace(here, address=self.open(self.source, [send_spec(0, here)], left_s)[0])
        self.open(self.source, [send_spec(rank, there) for rank in range(1, num_sources)], left_s, first=1)
        self.open(self.destination, [receive_spec(rank, there) for rank in range(num_engines)], left_s)
        both = [g.execute_all_async("weight_step", "join") for g in (self.source, self.destination)]
        first_cause([answer for answers in both for answer in answers], left_s)
        self.joined = True


class GatherExchange(_Pair):
    """Full tensors, bucket by bucket, through shared memory and the engines' own loaders."""

    def __init__(
        self, source: WeightGroup, destination: WeightGroup, *, timeout_s: float, bucket_bytes: int = 256 << 20
    ) -> None:
        super().__init__(source, destination, timeout_s=timeout_s)
        self.bucket_bytes = bucket_bytes

    def connect(self, sources: Layouts, destinations: Layouts, left_s: Left) -> None:
        names = resolve_names(sources, destinations)
        dtypes = {names[name]: dtype for layout in reversed(destinations) for name, dtype in layout.dtypes.items()}
        spec = GatherSpec(dtypes, names, self.bucket_bytes)
        self.open(self.source, [replace(spec, writer=rank) for rank in range(self.source.world_size)], left_s)
        self.open(self.destination, [spec] * self.destination.world_size, left_s)

    def push(self, version: int, left_s: Left) -> list[Moved]:
        self.send(version, left_s)
        self.receive(version, left_s)
        sums: dict[str, int] = {}
        while bucket := self.step(self.source, left_s, "bucket", version)[0]:
            sums |= {entry.name: stated for entry, stated in zip(bucket.tensors, bucket.sums, strict=True)}
            self.step(self.destination, left_s, "bucket", version, bucket)
        checksum = digest(sums)
        return [replace(part, checksum=checksum) for part in self.step(self.destination, left_s, "finish", version)]


class LocalExchange(_Pair):
    """Both engines in every worker of one group."""

    def connect(self, sources: Layouts, destinations: Layouts, left_s: Left) -> None:
        """Nothing is to be prepared."""

    def push(self, version: int, left_s: Left) -> list[Moved]:
        return all_of(self.source.execute_all_async("reshard_weights", version), left_s)
