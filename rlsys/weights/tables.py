"""Layouts as arrays, so that a plan for hundreds of ranks is arithmetic on columns.

Boxes and their places in local tensors are right-aligned in D columns: a tensor of n dimensions uses the last n, the
leading ones are the range 0 to 1. Ranks that hold the same shards share one template, so that shards are listed, and
intersected with those of the other side, once for each template and not for each rank.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count, groupby, pairwise, product
from typing import NamedTuple, TypeVar

import numpy as np

from rlsys.types import WeightLayout
from rlsys.utils.grouping import group_by

Ints = np.ndarray
ValueT = TypeVar("ValueT")


class ShardTable(NamedTuple):
    """Shards of all templates of one side, one row each, as columns (N,), starts and stops as (N, D).

    `template`, by which rows are sorted, `tensor`, `local` and `dtype` are numbers (see `NameIds`). The box of a shard
    is from `start` to `stop` of its tensor, and from `local_start` on in a local tensor of `local_dims` dimensions.
    """

    template: Ints
    tensor: Ints
    start: Ints
    stop: Ints
    local: Ints
    local_start: Ints
    local_dims: Ints
    dtype: Ints

    def places(self, shards: Ints, start: Ints) -> "LocalPlaces":
        """Where the elements of shards from `start` (N, D) on are."""
        local_start = self.local_start[shards] + start - self.start[shards]
        return LocalPlaces(self.local[shards], local_start, self.local_dims[shards], self.dtype[shards])


class LocalPlaces(NamedTuple):
    """Local tensors (N,), starts in them (N, D), their numbers of dimensions and dtypes."""

    local: Ints
    start: Ints
    dims: Ints
    dtype: Ints


class BoxTable(NamedTuple):
    """Distinct boxes (B, D), sorted by tensor, and the number of the box of every shard (N,)."""

    tensor: Ints
    start: Ints
    stop: Ints
    of_shard: Ints


class NameIds:
    """Numbers for the names of HF tensors, local tensors and dtypes: each gets the next one when it is first used."""

    def __init__(self) -> None:
        self.tensors, self.locals, self.dtypes = (defaultdict[str, int](count().__next__) for _ in range(3))


def merged(mappings: Iterable[Mapping[str, ValueT]]) -> dict[str, ValueT]:
    """The entries of the ranks' mappings, of which neighbours mostly equal each other."""
    return {name: value for mapping, _ in groupby(mappings) for name, value in mapping.items()}


def find_templates(layouts: Sequence[WeightLayout]) -> tuple[list[WeightLayout], Ints]:
    """The distinct layouts, and for every layout the number of its template among these (L,).

    Layouts are the same if their digests are, or without digests if they share the very tuple of shards.
    """
    keys = [layout.digest or (id(layout.shards), id(layout.dtypes)) for layout in layouts]
    templates = dict(zip(keys, layouts, strict=True))
    number_of = {key: number for number, key in enumerate(templates)}
    return list(templates.values()), np.array([number_of[key] for key in keys], dtype=np.int64)


def shard_table(templates: Sequence[WeightLayout], names: Mapping[str, str], dims: int, ids: NameIds) -> ShardTable:
    """The shards of the templates without empty ones; `names` gives the trainer's name of each of their tensors."""
    parts = list[ShardTable]()
    for number, layout in enumerate(templates):
        dtype_of = {name: ids.dtypes[dtype] for name, dtype in layout.dtypes.items()}
        by_dims = group_by(layout.shards, lambda shard: (len(shard.box.start), len(shard.local_start)))
        for (num_dims, num_local_dims), shards in by_dims.items():
            count = len(shards)
            start = _columns([s.box.start for s in shards], num_dims, dims, 0)
            stop = start + _columns([s.box.shape for s in shards], num_dims, dims, 1)
            tensors = [s.box.tensor for s in shards]
            part = ShardTable(
                template=np.full(count, number, np.int32),
                tensor=np.fromiter((ids.tensors[names[name]] for name in tensors), np.int32, count),
                start=start,
                stop=stop,
                local=np.fromiter((ids.locals[s.local] for s in shards), np.int32, count),
                local_start=_columns([s.local_start for s in shards], num_local_dims, dims, 0),
                local_dims=np.full(count, num_local_dims, np.int32),
                dtype=np.fromiter(map(dtype_of.__getitem__, tensors), np.int32, count),
            )
            filled = (stop > start).all(1)
            parts.append(part if filled.all() else ShardTable(*(column[filled] for column in part)))
    if not parts:
        one, many = np.zeros(0, np.int32), np.zeros((0, dims), np.int64)
        return ShardTable(one, one, many, many, one, many, one, one)
    return ShardTable(*map(np.concatenate, zip(*parts, strict=True)))


def disjoint_boxes(boxes: BoxTable, shards: ShardTable) -> tuple[BoxTable, Ints, Ints]:
    """Disjoint boxes that make up all boxes, and every (disjoint box, shard that contains it) as two columns.

    Where the boxes of a tensor are disjoint already, as they usually are, they are used as they are.
    """
    overlapping = _overlapping(boxes)
    if not len(overlapping):
        return boxes, boxes.of_shard, np.arange(len(shards.tensor))
    rest = np.flatnonzero(~np.isin(shards.tensor, overlapping))
    parts = [(shards.tensor[rest], shards.start[rest], shards.stop[rest], rest)]
    parts += [_cells(int(tensor), np.flatnonzero(shards.tensor == tensor), shards) for tensor in overlapping]
    tensor, start, stop, holder = (np.concatenate(column) for column in zip(*parts, strict=True))
    disjoint = distinct_boxes(tensor, start, stop)
    return disjoint, disjoint.of_shard, holder


def intersections(wanted: BoxTable, held: BoxTable) -> tuple[Ints, Ints, Ints, Ints]:
    """All non-empty intersections as columns: the wanted box (P,), sorted, the held box (P,), starts, stops (P, D)."""
    first = np.searchsorted(held.tensor, wanted.tensor, "left")
    left, right = join_ranges(first, np.searchsorted(held.tensor, wanted.tensor, "right") - first)
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


def last_columns(table: Ints, dims: Ints) -> list[tuple[int, ...]]:
    """The last `dims` (N,) numbers of each row of a table (N, D)."""
    return [tuple(row[len(row) - n :]) for row, n in zip(table.tolist(), dims.tolist(), strict=True)]


def distinct_boxes(tensor: Ints, start: Ints, stop: Ints) -> BoxTable:
    """The distinct boxes of some shards, sorted by tensor."""
    boxes, of_row = np.unique(np.column_stack([tensor, start, stop]), axis=0, return_inverse=True)
    tensors, starts, stops = np.split(boxes, [1, 1 + start.shape[1]], axis=1)
    return BoxTable(tensors[:, 0], starts, stops, of_row.reshape(-1))


def _overlapping(boxes: BoxTable) -> Ints:
    """The tensors of which two distinct boxes overlap.

    Boxes that are apart in one dimension do not overlap. Sorted by that dimension this shows between neighbours, so a
    tensor whose boxes it separates is done; all pairs are compared only of the tensors that no dimension separates.
    """
    rest = np.arange(len(boxes.tensor))
    for dim in range(boxes.start.shape[1]):
        order = rest[np.lexsort((boxes.start[rest, dim], boxes.tensor[rest]))]
        before, after = order[:-1], order[1:]
        meet = (boxes.tensor[before] == boxes.tensor[after]) & (boxes.stop[before, dim] > boxes.start[after, dim])
        rest = rest[np.isin(boxes.tensor[rest], boxes.tensor[after[meet]])]
    part = BoxTable(boxes.tensor[rest], boxes.start[rest], boxes.stop[rest], rest)
    left, right, _, _ = intersections(part, part)
    return np.unique(part.tensor[left[left != right]])


def _cells(tensor: int, members: Ints, shards: ShardTable) -> tuple[Ints, Ints, Ints, Ints]:
    """One tensor cut at every start and stop of its shards: each cell of this grid in each shard that contains it.

    As columns: the tensor, starts and stops of the cells (N, D), and the shard.
    """
    dims = shards.start.shape[1]
    cuts = [np.unique(np.concatenate([shards.start[members, d], shards.stop[members, d]])) for d in range(dims)]
    starts, stops, holders = [], [], []
    for row in members:
        inside = [c[(c >= a) & (c <= b)] for c, a, b in zip(cuts, shards.start[row], shards.stop[row], strict=True)]
        edges = np.array(list(product(*map(pairwise, inside))))  # (cells, D, 2)
        starts.append(edges[..., 0])
        stops.append(edges[..., 1])
        holders.append(np.full(len(edges), row))
    holder = np.concatenate(holders)
    return np.full(len(holder), tensor, np.int32), np.concatenate(starts), np.concatenate(stops), holder
