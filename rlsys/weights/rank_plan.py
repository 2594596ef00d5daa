"""A plan split by rank, with the checksums that prove that each copy arrived: shared by `ipc`, `shm` and `nccl`.

Copies of the same elements in the same dtype have one checksum id; the first trainer rank that gives them computes the
checksum, every engine that receives them compares its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from rlsys.interfaces import RolloutEngine
from rlsys.types import Box, Shapes, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import add_checksums, digest, prepared_checksums
from rlsys.weights.engine_update import EngineUpdate
from rlsys.weights.layout import dtype_of
from rlsys.weights.plan import RANK, SOURCE_RANK, SOURCE_SHARD, Copy, Plan, full_shapes
from rlsys.weights.verify import tiling

Checksums = Callable[[], list[int]]
"""Computes the checksums of the same boxes at every call."""


@dataclass(frozen=True)
class RankPlan:
    """A rank's part of a transfer: the `copies` whose checksums it computes.

    Of an engine rank these are all copies that it receives, with the checksum id of each. Of a trainer rank they are
    those of which it is the first to give the elements; `local_names` are the local tensors of all that it gives.
    """

    copies: tuple[Copy, ...]
    full_shapes: Shapes
    checksum_ids: tuple[int, ...] = ()
    local_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankPlans:
    """The parts of all ranks; `checksum_ids` has for each trainer rank the ids of its copies."""

    plan: Plan
    sources: tuple[RankPlan, ...]
    checksum_ids: tuple[np.ndarray, ...]

    def destination(self, rank: int) -> RankPlan:
        """The part of an engine rank."""
        chosen = np.flatnonzero(self.plan.moves[:, RANK] == rank)
        copies, shapes = self.plan.select(chosen), self.sources[0].full_shapes
        own = {name: shapes[name] for name in {copy.tensor for copy in copies}}
        return RankPlan(copies, own, tuple(self.plan.checksum_ids[0][chosen].tolist()))

    def merge(self, by_rank: Sequence[np.ndarray]) -> np.ndarray:
        """The checksums of all trainer ranks, indexed by id."""
        merged = np.empty(sum(map(len, by_rank)), np.uint64)
        for ids, checksums in zip(self.checksum_ids, by_rank, strict=True):
            merged[ids] = checksums
        return merged

    def digest(self, checksums: np.ndarray) -> str:
        """One checksum for all tensors, the same for any layouts."""
        numbers = checksums.tolist()
        return digest({name: add_checksums([numbers[n] for n in ids]) for name, ids in self._tilings.items()})

    @cached_property
    def _tilings(self) -> dict[str, list[int]]:
        """For each tensor the ids of copies that together are all of it, each element once."""
        boxes: dict[str, dict[Box, int]] = {}
        copies = (copy for source in self.sources for copy in source.copies)
        for copy, number in zip(copies, np.concatenate(self.checksum_ids).tolist(), strict=True):
            boxes.setdefault(copy.tensor, {}).setdefault(Box(copy.tensor, copy.start, copy.shape), number)
        shapes = self.sources[0].full_shapes
        return {name: [ids[box] for box in tiling(name, tuple(shapes[name]), ids)] for name, ids in boxes.items()}


def split_plan(plan: Plan, sources: Sequence[WeightLayout]) -> RankPlans:
    """Split a plan by rank; `sources` are ordered by rank."""
    _, first = plan.checksum_ids
    source_ranks = plan.moves[first, SOURCE_RANK]
    shapes = full_shapes(sources)
    parts, ids = list[RankPlan](), list[np.ndarray]()
    for layout in sources:
        ids.append(np.flatnonzero(source_ranks == layout.rank))
        given = np.unique(plan.source_shards.local[plan.moves[plan.moves[:, SOURCE_RANK] == layout.rank, SOURCE_SHARD]])
        parts.append(RankPlan(plan.select(first[ids[-1]]), shapes, local_names=tuple(plan.locals[n] for n in given)))
    return RankPlans(plan, tuple(parts), tuple(ids))


def source_checksums(plan: RankPlan, tensors: Mapping[str, Tensor]) -> Checksums:
    """The checksums of a trainer rank, each of the values cast to the dtype in which they will arrive."""
    return _checksums(plan, [copy.source_view(tensors) for copy in plan.copies])


def _checksums(plan: RankPlan, values: Sequence[Tensor]) -> Checksums:
    """Those of a rank's copies, whose values are here."""
    shapes = [plan.full_shapes[copy.tensor] for copy in plan.copies]
    boxes = [(box.detach(), copy.start, full) for box, copy, full in zip(values, plan.copies, shapes, strict=True)]
    return prepared_checksums(boxes, [dtype_of(copy.dtype) for copy in plan.copies])


class PlanReceiver:
    """A rollout rank written by its part of a plan; its engine is quarantined from `receive` to `finish`."""

    def __init__(self, plan: RankPlan, engine: RolloutEngine) -> None:
        self.plan, self.update = plan, EngineUpdate(engine)
        self.received: int | None = None
        self.checksums: Checksums | None = None
        """Made at the first `finish` after the memory of the engine has moved."""

    def finish(self, version: int, sent: np.ndarray) -> None:
        """Compare the checksums with those sent and release the engine; WeightTransferError names a tensor."""
        if self.received != version:
            raise WeightTransferError(f"this engine has not received weight version {version}")
        if self.checksums is None:
            tensors = self.update.tensors()
            self.checksums = _checksums(self.plan, [copy.view(tensors) for copy in self.plan.copies])
        for copy, number, checksum in zip(self.plan.copies, self.plan.checksum_ids, self.checksums(), strict=True):
            if checksum != int(sent[number]):
                raise WeightTransferError(f"tensor '{copy.tensor}': the received values differ from the trainer's")
        self.update.finish(version)
