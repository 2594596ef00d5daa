"""From who holds what to who sends what: the smallest set of copies that fills every destination box once.

Pure arithmetic on layouts. Where several source ranks hold the same elements, the nearest one gives them, and among
equally near ones the one that has least to give so far.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.layout import element_bytes, intersect, local_place, num_elements, subtract_all

Distance = Callable[[WeightLayout, WeightLayout], int]


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `shape` from `start` of an HF tensor: from one rank's local tensor to another's.

    `tensor` is the name on the source's side. Where the dtypes differ the source casts, so `num_bytes` is counted in
    the destination's dtype.
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    source_rank: int
    source_local: str
    source_start: tuple[int, ...]
    source_dtype: str
    rank: int
    local: str
    local_start: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * element_bytes(self.dtype)


@dataclass(frozen=True)
class Plan:
    """All copies of a transfer, and the source tensors that no destination wants."""

    copies: tuple[Copy, ...]
    unused: tuple[str, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies)

    def from_rank(self, rank: int) -> tuple[Copy, ...]:
        return tuple(copy for copy in self.copies if copy.source_rank == rank)

    def to_rank(self, rank: int) -> tuple[Copy, ...]:
        return tuple(copy for copy in self.copies if copy.rank == rank)

    def bytes_by_link(self) -> dict[tuple[int, int], int]:
        """Bytes from each source rank to each destination rank."""
        links: Counter[tuple[int, int]] = Counter()
        for copy in self.copies:
            links[copy.source_rank, copy.rank] += copy.num_bytes
        return dict(links)


def distance_by_host(source: WeightLayout, destination: WeightLayout) -> int:
    """0 for the same rank of the same host (colocated), 1 for the same host, 2 for another host."""
    return 2 if source.host != destination.host else int(source.rank != destination.rank)


def resolve_names(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> dict[str, str]:
    """Under which name the sources hold each destination tensor, by the tied names of both sides.

    Raises WeightTransferError for a tensor that the sources do not have, or have in another shape.
    """
    held = {name: tuple(shape) for layout in sources for name, shape in layout.full_shapes.items()}
    tied_there = {alias: name for layout in sources for alias, name in layout.aliases.items()}
    tied_here: dict[str, list[str]] = defaultdict(list)
    for layout in destinations:
        for alias, name in layout.aliases.items():
            tied_here[name].append(alias)
    names: dict[str, str] = {}
    for layout in destinations:
        for name, shape in layout.full_shapes.items():
            if name in names:
                continue
            wanted = [name, *sorted(set(tied_here[name]))]
            found = next((n for w in wanted for n in (w, tied_there.get(w)) if n in held), None)
            if found is None:
                raise WeightTransferError(f"the trainer has no tensor '{name}' (of shape {tuple(shape)})")
            if held[found] != tuple(shape):
                shapes = f"{held[found]} at the trainer, {tuple(shape)} at the rollout engine"
                raise WeightTransferError(f"tensor '{name}' has two shapes: {shapes}")
            names[name] = found
    return names


def make_plan(
    sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout], *, distance: Distance = distance_by_host
) -> Plan:
    """The copies that fill all boxes of `destinations` out of `sources`; ranks must be unique on each side.

    Raises WeightTransferError naming a tensor that is missing, misshapen or not held completely.
    """
    for side in (sources, destinations):
        if len({layout.rank for layout in side}) < len(side):
            raise ValueError("the ranks of one side must differ")
    names = resolve_names(sources, destinations)
    by_tensor: dict[str, list[tuple[WeightLayout, Shard]]] = defaultdict(list)
    for layout in sources:
        for shard in layout.shards:
            by_tensor[shard.box.tensor].append((layout, shard))
    copies: list[Copy] = []
    given: Counter[int] = Counter()
    for destination in destinations:
        far = {layout.rank: distance(layout, destination) for layout in sources}
        for shard in destination.shards:
            copies += _fill(shard, destination, names[shard.box.tensor], by_tensor, far, given)
    unused = sorted({name for layout in sources for name in layout.full_shapes} - set(names.values()))
    return Plan(tuple(copies), tuple(unused))


def _fill(
    shard: Shard,
    destination: WeightLayout,
    name: str,
    by_tensor: Mapping[str, Sequence[tuple[WeightLayout, Shard]]],
    far: Mapping[int, int],
    given: Counter[int],
) -> list[Copy]:
    """The copies into one shard; `given` counts the bytes that each source rank gives."""
    wanted = Box(name, shard.box.start, shard.box.shape)
    if not num_elements(wanted):
        return []
    overlaps = [(s, held, common) for s, held in by_tensor[name] if (common := intersect(held.box, wanted))]
    overlaps.sort(key=lambda o: (far[o[0].rank], given[o[0].rank], -num_elements(o[2]), o[0].rank))
    dtype, missing, copies = destination.dtypes[shard.box.tensor], [wanted], list[Copy]()
    for source, held, common in overlaps:
        for gap in missing:
            if part := intersect(gap, common):
                copies.append(_copy(part, source, held, destination.rank, shard, dtype))
                given[source.rank] += copies[-1].num_bytes
        missing = subtract_all(missing, common)
        if not missing:
            return copies
    raise WeightTransferError(f"no rank of the trainer holds {missing[0]}, which rollout rank {destination.rank} wants")


def _copy(part: Box, source: WeightLayout, held: Shard, rank: int, shard: Shard, dtype: str) -> Copy:
    return Copy(
        tensor=part.tensor,
        start=part.start,
        shape=part.shape,
        source_rank=source.rank,
        source_local=held.local,
        source_start=local_place(held, part),
        source_dtype=source.dtypes[part.tensor],
        rank=rank,
        local=shard.local,
        local_start=local_place(shard, part),
        dtype=dtype,
    )
