"""Layouts as arrays, so that a plan for hundreds of ranks is arithmetic on columns.

Boxes and their places in local tensors are right-aligned in D columns: a tensor of n dimensions uses the last n, the
leading ones are the range 0 to 1. Ranks that hold the same shards share one template.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product

import numpy as np

from rlsys.types import Shard, WeightLayout

Ints = np.ndarray
MANY_BOXES = 64


@dataclass(frozen=True)
class ShardTable:
    """Shards of all templates of one side, one row each; `template` is sorted, starts and stops are (N, D)."""

    template: Ints
    tensor: Ints
    start: Ints
    stop: Ints
    local: Ints
    local_start: Ints
    local_dims: Ints
    dtype: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    def places(self, shards: Ints, start: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Local tensor, start in it, its dimensions and dtype of the elements of shards from `start` (N, D) on."""
        local_start = self.local_start[shards] + start - self.start[shards]
        return self.local[shards], local_start, self.local_dims[shards], self.dtype[shards]


@dataclass(frozen=True)
class BoxTable:
    """Distinct boxes (B, D), by tensor, and the box of every shard (N,)."""

    tensor: Ints
    start: Ints
    stop: Ints
    of_shard: Ints

    @property
    def volume(self) -> Ints:
        return (self.stop - self.start).prod(1)


class Ids(dict[str, int]):
    """Numbers for names, in the order of their first use."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


@dataclass(frozen=True)
class NameIds:
    """The ids of the names of HF tensors, local tensors and dtypes."""

    tensors: Ids = field(default_factory=Ids)
    locals: Ids = field(default_factory=Ids)
    dtypes: Ids = field(default_factory=Ids)


def unique_layouts(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    """The layouts without those whose digest has been seen."""
    seen = {layout.digest: layout for layout in layouts if layout.digest}
    return [*seen.values(), *(layout for layout in layouts if not layout.digest)]


def unique_mappings(mappings: Sequence[Mapping]) -> list[Mapping]:
    """The mappings without those that are the same object as an earlier one or equal the last one kept."""
    seen: dict[int, Mapping] = {}
    for mapping in mappings:
        if id(mapping) not in seen and not (seen and next(reversed(seen.values())) == mapping):
            seen[id(mapping)] = mapping
    return list(seen.values())


def find_templates(layouts: Sequence[WeightLayout]) -> tuple[list[WeightLayout], Ints]:
    """One layout for each set of shards, and the template of every layout (L,)."""
    by_identity: dict[tuple[int, int] | str, int] = {}
    by_sample: dict[tuple, list[int]] = defaultdict(list)
    templates: list[WeightLayout] = []
    numbers = list[int]()
    for layout in layouts:
        key = layout.digest or (id(layout.shards), id(layout.dtypes))
        if key not in by_identity:
            shards = layout.shards
            sample = (len(shards), *shards[:1], *shards[len(shards) // 2 : len(shards) // 2 + 1], *shards[-1:])
            candidates = ((n, templates[n]) for n in by_sample[sample])
            equal = (n for n, known in candidates if known.shards == shards and known.dtypes == layout.dtypes)
            number = next(equal, len(templates))
            if number == len(templates):
                templates.append(layout)
                by_sample[sample].append(number)
            by_identity[key] = number
        numbers.append(by_identity[key])
    return templates, np.array(numbers, dtype=np.int64)


def num_dims(templates: Sequence[WeightLayout]) -> int:
    """The most dimensions of any local tensor, at least one."""
    return max([1, *(len(shard.local_start) for layout in templates for shard in layout.shards)])


def shard_table(
    templates: Sequence[WeightLayout], names: Mapping[str, str] | None, dims: int, ids: NameIds
) -> ShardTable:
    """The shards of the templates as columns without empty ones; `names` are the source's names of tensors."""
    parts = []
    for number, layout in enumerate(templates):
        groups: dict[tuple[int, int], list[Shard]] = defaultdict(list)
        for shard in layout.shards:
            groups[len(shard.box.start), len(shard.local_start)].append(shard)
        dtype_of = {name: ids.dtypes[dtype] for name, dtype in layout.dtypes.items()}
        for (n, m), shards in groups.items():
            count = len(shards)
            start = _columns([s.box.start for s in shards], n, dims, 0)
            stop = start + _columns([s.box.shape for s in shards], n, dims, 1)
            tensors = [s.box.tensor for s in shards]
            id_of = ids.tensors.__getitem__ if names is None else lambda name: ids.tensors[names[name]]
            columns = (
                np.full(count, number, np.int32),
                np.fromiter(map(id_of, tensors), np.int32, count),
                start,
                stop,
                np.fromiter((ids.locals[s.local] for s in shards), np.int32, count),
                _columns([s.local_start for s in shards], m, dims, 0),
                np.full(count, m, np.int32),
                np.fromiter(map(dtype_of.__getitem__, tensors), np.int32, count),
            )
            filled = (stop > start).all(1)
            parts.append(columns if filled.all() else tuple(column[filled] for column in columns))
    if not parts:
        one, many = np.zeros(0, np.int32), np.zeros((0, dims), np.int64)
        return ShardTable(one, one, many, many, one, many, one, one)
    return ShardTable(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def box_table(shards: ShardTable) -> BoxTable:
    """The distinct boxes of the shards, sorted by tensor."""
    return _unique(shards.tensor, shards.start, shards.stop)


def disjoint_boxes(boxes: BoxTable, shards: ShardTable) -> tuple[BoxTable, Ints, Ints]:
    """Disjoint boxes that make up all boxes, and every (disjoint box, shard that contains it) as two columns.

    Where the boxes of a tensor are disjoint already, as they usually are, they are used as they are.
    """
    overlapping = _overlapping(boxes)
    if not len(overlapping):
        return boxes, boxes.of_shard, np.arange(len(shards))
    rest = np.flatnonzero(~np.isin(shards.tensor, overlapping))
    parts = [(shards.tensor[rest], shards.start[rest], shards.stop[rest], rest)]
    for tensor in overlapping:
        parts.append(_cells(int(tensor), np.flatnonzero(shards.tensor == tensor), shards))
    tensor, start, stop, holder = (np.concatenate(column) for column in zip(*parts, strict=True))
    disjoint = _unique(tensor, start, stop)
    return disjoint, disjoint.of_shard, holder


def intersections(wanted: BoxTable, held: BoxTable) -> tuple[Ints, Ints, Ints, Ints]:
    """All non-empty intersections: number of the wanted box (sorted), of the held one, starts and stops (P, D)."""
    first = np.searchsorted(held.tensor, wanted.tensor, "left")
    count = np.searchsorted(held.tensor, wanted.tensor, "right") - first
    left, right = join_ranges(first, count)
    start = np.maximum(wanted.start[left], held.start[right])
    stop = np.minimum(wanted.stop[left], held.stop[right])
    filled = (stop > start).all(1)
    return left[filled], right[filled], start[filled], stop[filled]


def join_ranges(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Every (i, j) with first[i] <= j < first[i] + count[i], as two columns."""
    left = np.repeat(np.arange(len(first)), count)
    return left, np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)


def _columns(values: Sequence[Sequence[int]], n: int, dims: int, fill: int) -> Ints:
    """Tuples of n numbers in the last n of `dims` columns."""
    table = np.full((len(values), dims), fill, np.int64)
    if n:
        table[:, dims - n :] = np.fromiter(chain.from_iterable(values), np.int64, n * len(values)).reshape(-1, n)
    return table


def _unique(tensor: Ints, start: Ints, stop: Ints) -> BoxTable:
    """The distinct rows, found by their hashes where these do not collide."""
    table = np.column_stack([tensor.astype(np.int64), start, stop])
    mix = np.random.default_rng(7).integers(1 << 61, size=table.shape[1]) | 1
    with np.errstate(over="ignore"):
        keys = (table * mix).sum(1)
        keys ^= keys >> 29
    _, chosen, of_row = np.unique(keys, return_index=True, return_inverse=True)
    if not (table[chosen][of_row] == table).all():
        _, chosen, of_row = np.unique(table, axis=0, return_index=True, return_inverse=True)
    order = np.lexsort((chosen, tensor[chosen]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    chosen = chosen[order]
    return BoxTable(tensor[chosen], start[chosen], stop[chosen], rank[of_row.reshape(-1)])


def _overlapping(boxes: BoxTable) -> Ints:
    """The tensors of which two distinct boxes overlap."""
    tensors, first, count = np.unique(boxes.tensor, return_index=True, return_counts=True)
    few = np.flatnonzero((count > 1) & (count <= MANY_BOXES))
    overlapping = set[int]()
    if len(few):
        members = join_ranges(first[few], count[few])[1]
        ends = np.repeat(first[few] + count[few], count[few])
        left, right = join_ranges(members + 1, ends - members - 1)
        left = members[left]
        stop, start = np.minimum(boxes.stop[left], boxes.stop[right]), np.maximum(boxes.start[left], boxes.start[right])
        overlapping = set(boxes.tensor[left[(stop > start).all(1)]].tolist())
    for number in np.flatnonzero(count > MANY_BOXES):
        part = slice(first[number], first[number] + count[number])
        if _do_overlap(boxes.start[part], boxes.stop[part]):
            overlapping.add(int(tensors[number]))
    return np.array(sorted(overlapping), dtype=np.int64)


def _do_overlap(start: Ints, stop: Ints) -> bool:
    """Whether any of many boxes overlap: by sorting where they are cut along one dimension, else by pairs."""
    cut = np.flatnonzero((start != start[0]).any(0) | (stop != stop[0]).any(0))
    if len(cut) == 1:
        order = np.argsort(start[:, cut[0]], kind="stable")
        return bool((stop[order[:-1], cut[0]] > start[order[1:], cut[0]]).any())
    return any(
        (np.minimum(stop[i], stop[i + 1 :]) > np.maximum(start[i], start[i + 1 :])).all(1).any()
        for i in range(len(start))
    )


def _cells(tensor: int, members: Ints, shards: ShardTable) -> tuple[Ints, Ints, Ints, Ints]:
    """The cells of the grid of all cuts of one tensor that are in its shards, once for each shard, and the shard."""
    dims = shards.start.shape[1]
    cuts = [np.unique(np.concatenate([shards.start[members, d], shards.stop[members, d]])) for d in range(dims)]
    starts, stops, holder = [], [], []
    for row in members:
        ranges = []
        for d in range(dims):
            inside = cuts[d][(cuts[d] >= shards.start[row, d]) & (cuts[d] <= shards.stop[row, d])]
            ranges.append(list(pairwise(inside)))
        for cell in product(*ranges):
            starts.append([a for a, _ in cell])
            stops.append([b for _, b in cell])
            holder.append(row)
    return np.full(len(holder), tensor, np.int32), np.array(starts), np.array(stops), np.array(holder)
