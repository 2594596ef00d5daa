"""The pulling executor: trainer ranks lend their memory, each engine copies what it holds straight into its parameters.

On GPUs of one host through CUDA IPC, on a CPU through shared memory; nothing is gathered and nothing is staged. The
trainer's tensors must not change between `send` and the last `finish`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import Box, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import box_checksums, digest, prepared_checksums
from rlsys.weights.checksum_cpu import Held
from rlsys.weights.executors.handles import Borrowed, Offer, offer_of
from rlsys.weights.layout import device_of, dtype_of, view_of
from rlsys.weights.plan import Copy, Plan
from rlsys.weights.replay import Method, Replay
from rlsys.weights.tables import unlike
from rlsys.weights.target import Moved, Target
from rlsys.weights.verify import merge_boxes


@dataclass(frozen=True)
class LendSpec:
    """A trainer rank's part: the local tensors to lend, and the elements whose checksums it states, in order."""

    names: tuple[str, ...]
    proofs: tuple[Copy, ...]
    full_shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PullSpec:
    """An engine's part: its copies with the number of the checksum of each, and what each trainer rank lends."""

    copies: tuple[Copy, ...]
    proofs: tuple[int, ...]
    full_shapes: Mapping[str, tuple[int, ...]]
    offers: Mapping[int, Offer]
    method: Method = "auto"


@dataclass(frozen=True)
class Published:
    """What a trainer rank stands for at a version: its checksums, and its offer where the memory has moved."""

    version: int
    sums: np.ndarray
    seconds: float
    offer: Offer | None = None


@dataclass(frozen=True)
class PullPlan:
    """Both sides' parts; `proof_order` puts the checksums of all trainer ranks, one rank after the other, in order."""

    plan: Plan
    lenders: tuple[LendSpec, ...]
    proof_order: np.ndarray

    def reader(self, rank: int, offers: Mapping[int, Offer], *, method: Method = "auto") -> PullSpec:
        chosen = np.flatnonzero(self.plan.moves[:, 4] == rank)
        copies = self.plan.select(chosen)
        shapes = self.lenders[0].full_shapes
        return PullSpec(
            copies=copies,
            proofs=tuple(self.plan.proofs[0][chosen].tolist()),
            full_shapes={name: shapes[name] for name in {copy.tensor for copy in copies}},
            offers={number: offers[number] for number in {copy.source_rank for copy in copies} if number in offers},
            method=method,
        )

    def merged(self, published: Sequence[Published]) -> np.ndarray:
        """The checksums of all ranks by their numbers."""
        sums = np.concatenate([part.sums for part in published])
        merged = np.empty_like(sums)
        merged[self.proof_order] = sums
        return merged

    def digest(self, sums: np.ndarray) -> str:
        """One checksum for all tensors, the same whatever the layouts."""
        parts: dict[str, dict[Box, int]] = {}
        for copy, number in self._proofs:
            parts.setdefault(copy.tensor, {}).setdefault(Box(copy.tensor, copy.start, copy.shape), int(sums[number]))
        shapes = self.lenders[0].full_shapes
        return digest({name: merge_boxes(name, tuple(shapes[name]), boxes) for name, boxes in parts.items()})

    @cached_property
    def _proofs(self) -> list[tuple[Copy, int]]:
        copies = [copy for lender in self.lenders for copy in lender.proofs]
        return list(zip(copies, self.proof_order.tolist(), strict=True))


def plan_pull(plan: Plan, sources: Sequence[WeightLayout]) -> PullPlan:
    """Share out a plan; `sources` in the order of their ranks."""
    _, first = plan.proofs
    givers = plan.moves[first, 3]
    shapes = {name: tuple(shape) for layout in unlike(sources) for name, shape in layout.full_shapes.items()}
    lenders, order = [], []
    for layout in sources:
        mine = np.flatnonzero(givers == layout.rank)
        order.append(mine)
        locals_ = np.unique(plan.source_places.local[plan.moves[plan.moves[:, 3] == layout.rank, 1]])
        lenders.append(LendSpec(tuple(plan.locals[n] for n in locals_), plan.select(first[mine]), shapes))
    return PullPlan(plan, tuple(lenders), np.concatenate(order))


@torch.no_grad()
def stated(spec: LendSpec, tensors: Mapping[str, Tensor]) -> Callable[[], list[int]]:
    """What gives the checksums of a rank's proofs, each cast first to the dtype in which it will arrive."""

    def held(copy: Copy) -> Held:
        values = view_of(tensors[copy.source_local], copy.source_start, copy.shape)
        return values.to(dtype_of(copy.dtype)), copy.start, spec.full_shapes[copy.tensor]

    if all(tensors[copy.source_local].dtype == dtype_of(copy.dtype) for copy in spec.proofs):
        return prepared_checksums([held(copy) for copy in spec.proofs])
    return lambda: box_checksums(held(copy) for copy in spec.proofs)


@torch.no_grad()
def arrived(spec: PullSpec, tensors: Mapping[str, Tensor]) -> Callable[[], list[int]]:
    """What gives the checksums of a rank's copies where they arrive."""
    return prepared_checksums(
        [
            (view_of(tensors[copy.local], copy.local_start, copy.shape), copy.start, spec.full_shapes[copy.tensor])
            for copy in spec.copies
        ]
    )


def check_sums(spec: PullSpec, found: Sequence[int], sums: np.ndarray) -> None:
    """WeightTransferError naming a tensor of which what arrived is not what was stated."""
    for copy, number, checksum in zip(spec.copies, spec.proofs, found, strict=True):
        if checksum != int(sums[number]):
            raise WeightTransferError(f"tensor '{copy.tensor}' that arrived is not the one that the trainer holds")


class Lender:
    """A trainer rank's side. What it lent stays until it lends anew: merged adapters are fresh tensors at each push."""

    def __init__(self, spec: LendSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self._places: list[int] = []
        self._lent: Mapping[str, Tensor] = {}
        self._sums: Callable[[], list[int]] | None = None
        self.version: int | None = None
        self.address = self._lend(engine.local_tensors())
        self._news: Offer | None = None

    @torch.no_grad()
    def send(self, version: int, *, verify: bool = True) -> Published:
        """State the checksums of what the version holds; the memory must stay as it is until it is confirmed."""
        started_s = time.monotonic()
        self.version = None
        tensors = self.engine.local_tensors()
        if self._places != self._places_of(tensors):
            self._news = self._lend(tensors)
        _wait_for_device(tensors)
        if verify and self._sums is None:
            self._sums = stated(self.spec, tensors)
        sums = np.array(self._sums() if verify and self._sums else [], np.uint64)
        self.version = version
        return Published(version, sums, time.monotonic() - started_s, self._news)

    def confirm(self, version: int) -> None:
        """WeightTransferError unless this rank lives and last sent this version."""
        if self.version != version:
            raise WeightTransferError(f"the trainer no longer holds weight version {version}")
        self._news = None

    def close(self) -> None:
        self.version, self._lent, self._sums = None, {}, None

    def _lend(self, tensors: Mapping[str, Tensor]) -> Offer:
        offer = offer_of({name: tensors[name] for name in self.spec.names})
        self._places, self._lent, self._sums = self._places_of(tensors), tensors, None
        return offer

    def _places_of(self, tensors: Mapping[str, Tensor]) -> list[int]:
        return [tensors[name].data_ptr() for name in self.spec.names]


class Puller:
    """A rollout engine's side."""

    def __init__(self, spec: PullSpec, engine: RolloutEngine) -> None:
        self.spec, self.target = spec, Target(engine)
        self.pulled: int | None = None
        self.replay: Replay | None = None
        self._sums: Callable[[], list[int]] | None = None
        self._places: dict[str, int] = {}
        self._offers = dict(spec.offers)
        self._borrowed: dict[int, Borrowed] = {}

    def receive(self, version: int, offers: Mapping[int, Offer] | None = None) -> Moved:
        """Quarantine the engine and copy; it stays quarantined until `finish`."""
        started_s = time.monotonic()
        self.pulled = None
        tensors = self.target.begin()
        replay = self._ready(tensors, offers or {})
        replay.run()
        _wait_for_device(tensors)
        self.pulled = version
        return Moved(version, replay.num_bytes, time.monotonic() - started_s, "")

    def finish(self, version: int, sums: np.ndarray | None) -> None:
        """Check what arrived and release the engine."""
        if self.pulled != version:
            raise WeightTransferError(f"this engine has not pulled weight version {version}")
        if sums is not None:
            self._sums = self._sums or arrived(self.spec, self.target.tensors())
            check_sums(self.spec, self._sums(), sums)
        self.target.finish(version)

    def close(self) -> None:
        self.replay = self._sums = None
        self._forget(list(self._borrowed))

    def _ready(self, tensors: Mapping[str, Tensor], offers: Mapping[int, Offer]) -> Replay:
        """The compiled copies, made anew where memory has moved on either side."""
        places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        moved = [rank for rank in offers if rank in self._offers]
        if self.replay is not None and places == self._places and not moved:
            return self.replay
        self.replay = self._sums = None
        self._forget(moved)
        self._offers.update({rank: offers[rank] for rank in moved})
        device = device_of(tensors)
        for rank, offer in self._offers.items():
            if rank not in self._borrowed:
                names = {copy.source_local for copy in self.spec.copies if copy.source_rank == rank}
                self._borrowed[rank] = Borrowed(offer, names, device=device)
        pairs = []
        for copy in self.spec.copies:
            source = self._borrowed[copy.source_rank].tensors[copy.source_local]
            given = view_of(source, copy.source_start, copy.shape)
            pairs.append((view_of(tensors[copy.local], copy.local_start, copy.shape), given))
        self.replay, self._places = Replay(pairs, method=self.spec.method), places
        return self.replay

    def _forget(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self._borrowed:
                self._borrowed.pop(rank).close()


def _wait_for_device(tensors: Mapping[str, Tensor]) -> None:
    if (device := device_of(tensors)).type == "cuda":
        torch.cuda.synchronize(device)
