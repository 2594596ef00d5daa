"""Layouts as arrays, so that a plan for hundreds of ranks is arithmetic on columns.

Boxes and local places are right-aligned in D columns: a tensor of n dimensions uses the last n, the leading ones are
the range 0 to 1. Ranks that hold the same things share one template.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product

import numpy as np

from rlsys.types import Shard, WeightLayout

Ints = np.ndarray
MANY_BOXES = 64


@dataclass(frozen=True)
class Rows:
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


@dataclass(frozen=True)
class Boxes:
    """Distinct boxes (B, D), by tensor, and the box of every row (N,)."""

    tensor: Ints
    start: Ints
    stop: Ints
    of_row: Ints

    @property
    def volume(self) -> Ints:
        return (self.stop - self.start).prod(1)


class Numbers(dict[str, int]):
    """Numbers for names, in the order of their first use."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def unique_layouts(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    """The layouts without those whose digest has been seen."""
    seen = {layout.digest: layout for layout in layouts if layout.digest}
    return [*seen.values(), *(layout for layout in layouts if not layout.digest)]


def unique_mappings(mappings: Sequence[Mapping]) -> list[Mapping]:
    """The mappings without repetitions, which are found by identity first and by the last one seen."""
    seen: dict[int, Mapping] = {}
    for mapping in mappings:
        if id(mapping) not in seen and not (seen and next(reversed(seen.values())) == mapping):
            seen[id(mapping)] = mapping
    return list(seen.values())


def templates_of(layouts: Sequence[WeightLayout]) -> tuple[list[WeightLayout], list[int]]:
    """One layout for each kind of rank, and the kind of every rank."""
    by_identity: dict[tuple[int, int] | str, int] = {}
    by_look: dict[tuple, list[int]] = defaultdict(list)
    kinds: list[WeightLayout] = []
    numbers = []
    for layout in layouts:
        key = layout.digest or (id(layout.shards), id(layout.dtypes))
        if key not in by_identity:
            shards = layout.shards
            look = (len(shards), *shards[:1], *shards[len(shards) // 2 : len(shards) // 2 + 1], *shards[-1:])
            alike = (n for n in by_look[look] if kinds[n].shards == shards and kinds[n].dtypes == layout.dtypes)
            number = next(alike, len(kinds))
            if number == len(kinds):
                kinds.append(layout)
                by_look[look].append(number)
            by_identity[key] = number
        numbers.append(by_identity[key])
    return kinds, numbers


def num_dims(templates: Sequence[WeightLayout]) -> int:
    """The most dimensions of any local tensor, at least one."""
    return max([1, *(len(shard.local_start) for layout in templates for shard in layout.shards)])


def rows_of(
    templates: Sequence[WeightLayout],
    names: Mapping[str, str] | None,
    dims: int,
    tensors: Numbers,
    locals_: Numbers,
    dtypes: Numbers,
) -> Rows:
    """The shards of the templates as columns, empty ones left out; `names` are the source's names of tensors."""
    parts = []
    for number, layout in enumerate(templates):
        groups: dict[tuple[int, int], list[Shard]] = defaultdict(list)
        for shard in layout.shards:
            groups[len(shard.box.start), len(shard.local_start)].append(shard)
        dtype_of = {name: dtypes[dtype] for name, dtype in layout.dtypes.items()}
        for (n, m), shards in groups.items():
            count = len(shards)
            start = _columns([s.box.start for s in shards], n, dims, 0)
            stop = start + _columns([s.box.shape for s in shards], n, dims, 1)
            used = [s.box.tensor for s in shards]
            number_of = tensors.__getitem__ if names is None else lambda name: tensors[names[name]]
            columns = (
                np.full(count, number, np.int32),
                np.fromiter(map(number_of, used), np.int32, count),
                start,
                stop,
                np.fromiter((locals_[s.local] for s in shards), np.int32, count),
                _columns([s.local_start for s in shards], m, dims, 0),
                np.full(count, m, np.int32),
                np.fromiter(map(dtype_of.__getitem__, used), np.int32, count),
            )
            some = (stop > start).all(1)
            parts.append(columns if some.all() else tuple(column[some] for column in columns))
    if not parts:
        one, many = np.zeros(0, np.int32), np.zeros((0, dims), np.int64)
        return Rows(one, one, many, many, one, many, one, one)
    return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def boxes_of(rows: Rows) -> Boxes:
    """The distinct boxes of the rows, sorted by tensor."""
    return _unique(rows.tensor, rows.start, rows.stop)


def atoms_of(boxes: Boxes, rows: Rows) -> tuple[Boxes, Ints, Ints]:
    """Disjoint boxes that make up all boxes, and every (atom, row that contains it) as two columns.

    Where the boxes of a tensor are disjoint already, which is the rule, they are the atoms.
    """
    bad = _overlapping(boxes)
    if not len(bad):
        return boxes, boxes.of_row, np.arange(len(rows))
    good_rows = np.flatnonzero(~np.isin(rows.tensor, bad))
    pieces = [(rows.tensor[good_rows], rows.start[good_rows], rows.stop[good_rows], good_rows)]
    for tensor in bad:
        pieces.append(_cells(int(tensor), np.flatnonzero(rows.tensor == tensor), rows))
    tensor, start, stop, holder = (np.concatenate(column) for column in zip(*pieces, strict=True))
    atoms = _unique(tensor, start, stop)
    return atoms, atoms.of_row, holder


def meet(wanted: Boxes, atoms: Boxes) -> tuple[Ints, Ints, Ints, Ints]:
    """All non-empty intersections: number of the wanted box (sorted), of the atom, starts and stops (P, D)."""
    first = np.searchsorted(atoms.tensor, wanted.tensor, "left")
    count = np.searchsorted(atoms.tensor, wanted.tensor, "right") - first
    left, right = _join(first, count)
    start = np.maximum(wanted.start[left], atoms.start[right])
    stop = np.minimum(wanted.stop[left], atoms.stop[right])
    some = (stop > start).all(1)
    return left[some], right[some], start[some], stop[some]


def _columns(values: Sequence[Sequence[int]], n: int, dims: int, fill: int) -> Ints:
    """Tuples of n numbers in the last n of `dims` columns."""
    table = np.full((len(values), dims), fill, np.int64)
    if n:
        table[:, dims - n :] = np.fromiter(chain.from_iterable(values), np.int64, n * len(values)).reshape(-1, n)
    return table


def _join(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Every (i, j) with first[i] <= j < first[i] + count[i]."""
    left = np.repeat(np.arange(len(first)), count)
    return left, np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)


def _unique(tensor: Ints, start: Ints, stop: Ints) -> Boxes:
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
    return Boxes(tensor[chosen], start[chosen], stop[chosen], rank[of_row.reshape(-1)])


def _overlapping(boxes: Boxes) -> Ints:
    """Tensors of which two distinct boxes overlap."""
    tensors, first, count = np.unique(boxes.tensor, return_index=True, return_counts=True)
    few = np.flatnonzero((count > 1) & (count <= MANY_BOXES))
    bad = set()
    if len(few):
        members = _join(first[few], count[few])[1]
        ends = np.repeat(first[few] + count[few], count[few])
        left, right = _join(members + 1, ends - members - 1)
        left = members[left]
        apart = (
            np.minimum(boxes.stop[left], boxes.stop[right]) <= np.maximum(boxes.start[left], boxes.start[right])
        ).any(1)
        bad = set(boxes.tensor[left[~apart]].tolist())
    for number in np.flatnonzero(count > MANY_BOXES):
        part = slice(first[number], first[number] + count[number])
        if _overlap_of_many(boxes.start[part], boxes.stop[part]):
            bad.add(int(tensors[number]))
    return np.array(sorted(bad), dtype=np.int64)


def _overlap_of_many(start: Ints, stop: Ints) -> bool:
    """Whether boxes overlap; exact for cuts along one dimension, else by pairs in blocks."""
    cut = np.flatnonzero((start != start[0]).any(0) | (stop != stop[0]).any(0))
    if len(cut) == 1:
        order = np.argsort(start[:, cut[0]], kind="stable")
        return bool((stop[order[:-1], cut[0]] > start[order[1:], cut[0]]).any())
    for i in range(len(start)):
        apart = (np.minimum(stop[i], stop[i + 1 :]) <= np.maximum(start[i], start[i + 1 :])).any(1)
        if not apart.all():
            return True
    return False


def _cells(tensor: int, members: Ints, rows: Rows) -> tuple[Ints, Ints, Ints, Ints]:
    """The cells of the grid of all cuts of one tensor that lie in its rows, once for each row: columns and the row."""
    dims = rows.start.shape[1]
    cuts = [np.unique(np.concatenate([rows.start[members, d], rows.stop[members, d]])) for d in range(dims)]
    starts, stops, holder = [], [], []
    for row in members:
        spans = []
        for d in range(dims):
            inside = cuts[d][(cuts[d] >= rows.start[row, d]) & (cuts[d] <= rows.stop[row, d])]
            spans.append(list(pairwise(inside)))
        for cell in product(*spans):
            starts.append([a for a, _ in cell])
            stops.append([b for _, b in cell])
            holder.append(row)
    return np.full(len(holder), tensor, np.int32), np.array(starts), np.array(stops), np.array(holder)
