"""A copy plan from source and destination layouts: the smallest set of copies that fills every destination once.

Pure arithmetic on layouts. Where several source ranks hold the same elements, the nearest ones give them, and equally
near ones share them by the bytes that each has to give already.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights import tables
from rlsys.weights.layout import element_bytes, missing_boxes, view_of
from rlsys.weights.tables import BoxTable, Ints, NameIds, ShardTable


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
    rank: int
    local: str
    local_start: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * element_bytes(self.dtype)

    def source_view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The elements in the local tensors of the source rank."""
        return view_of(tensors[self.source_local], self.source_start, self.shape)

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The elements in the local tensors of the destination rank."""
        return view_of(tensors[self.local], self.local_start, self.shape)


PART, SOURCE_SHARD, SHARD, SOURCE_RANK, RANK = range(5)
"""The columns of `Plan.moves`; shard and rank are the destination's."""


@dataclass(frozen=True)
class Plan:
    """All copies of a transfer as columns, and the source tensors that no destination wants.

    `moves` (C, 5) has a row for each copy; a part is `shape` (P, D) elements of a tensor from `start`. All numbers
    index the tables of names.
    """

    tensors: tuple[str, ...]
    tensor_dims: Ints
    locals: tuple[str, ...]
    dtypes: tuple[str, ...]
    part_tensor: Ints
    start: Ints
    shape: Ints
    source_shards: ShardTable
    shards: ShardTable
    moves: Ints
    unused: tuple[str, ...]

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        return self.select(slice(None))

    @cached_property
    def checksum_ids(self) -> tuple[Ints, Ints]:
        """An id for every copy (C,), the same for the same elements and dtype, and the first copy of each id."""
        keys = self.moves[:, PART] * len(self.dtypes) + self.shards.dtype[self.moves[:, SHARD]]
        _, first, ids = np.unique(keys, return_index=True, return_inverse=True)
        return ids.reshape(-1), first

    def select(self, chosen: Ints | slice) -> tuple[Copy, ...]:
        """The copies at these positions, or where a mask says so."""
        part, source_shard, shard, source_rank, rank = self.moves[chosen].T
        tensor, start = self.part_tensor[part], self.start[part]
        source = self.source_shards.places(source_shard, start)
        destination = self.shards.places(shard, start)
        fields = {
            "tensor": [self.tensors[number] for number in tensor.tolist()],
            "start": tables.last_columns(start, self.tensor_dims[tensor]),
            "shape": tables.last_columns(self.shape[part], self.tensor_dims[tensor]),
            "source_rank": source_rank.tolist(),
            "source_local": [self.locals[number] for number in source.local.tolist()],
            "source_start": tables.last_columns(source.start, source.dims),
            "rank": rank.tolist(),
            "local": [self.locals[number] for number in destination.local.tolist()],
            "local_start": tables.last_columns(destination.start, destination.dims),
            "dtype": [self.dtypes[number] for number in destination.dtype.tolist()],
        }
        return tuple(Copy(*values) for values in zip(*fields.values(), strict=True))


def distance_by_host(source: WeightLayout, destination: WeightLayout) -> int:
    """0 for the same rank of the same host (colocated), 1 for the same host, 2 for another host."""
    return 2 if source.host != destination.host else int(source.rank != destination.rank)


def resolve_names(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> dict[str, str]:
    """The sources' name of each destination tensor, by the tied names of both sides.

    Raises WeightTransferError for a tensor that the sources do not have, or have in another shape.
    """
    held, source_aliases = full_shapes(sources), tables.merged(layout.aliases for layout in sources)
    aliases: dict[str, list[str]] = defaultdict(list)
    for alias, name in sorted(tables.merged(layout.aliases for layout in destinations).items()):
        aliases[name].append(alias)
    names: dict[str, str] = {}
    for name, shape in full_shapes(destinations).items():
        wanted = (name, *aliases.get(name, ()))
        source = next((n for w in wanted for n in (w, source_aliases.get(w)) if n in held), None)
        if source is None:
            raise WeightTransferError(f"the trainer has no tensor '{name}' (of shape {tuple(shape)})")
        if tuple(held[source]) != tuple(shape):
            both = f"{tuple(held[source])} at the trainer, {tuple(shape)} at the rollout engine"
            raise WeightTransferError(f"tensor '{name}' has two shapes: {both}")
        names[name] = source
    return names


def source_dtypes(names: Mapping[str, str], destinations: Sequence[WeightLayout]) -> dict[str, str]:
    """The engines' dtypes (the first engine's where they differ) by the sources' names, see `resolve_names`."""
    return {names[name]: dtype for layout in reversed(destinations) for name, dtype in layout.dtypes.items()}


def full_shapes(layouts: Sequence[WeightLayout]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of some ranks."""
    return tables.merged(layout.full_shapes for layout in layouts)


def make_plan(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> Plan:
    """The copies that fill all boxes of `destinations` from `sources`; ranks must be unique on each side.

    Raises WeightTransferError naming a tensor that is missing, misshapen or not held completely.
    """
    for layouts in (sources, destinations):
        if len({layout.rank for layout in layouts}) < len(layouts):
            raise ValueError("the ranks of one side must differ")
    names, shapes = resolve_names(sources, destinations), full_shapes(sources)
    source_templates, source_template = tables.find_templates(sources)
    templates, template = tables.find_templates(destinations)
    ids = NameIds()
    local_dims = [len(shard.local_start) for layout in (*source_templates, *templates) for shard in layout.shards]
    dims = max([1, *local_dims])
    shards = tables.shard_table(templates, names, dims, ids)
    source_shards = tables.shard_table(source_templates, {name: name for name in shapes}, dims, ids)
    wanted, given = (tables.distinct_boxes(side.tensor, side.start, side.stop) for side in (shards, source_shards))
    held, holder_box, holder_shard = tables.disjoint_boxes(given, source_shards)
    box, held_box, start, stop = tables.intersections(wanted, held)
    parts = _Parts(wanted, box, held_box, (stop - start).prod(1))
    if len(missing := parts.incomplete_tensors()):
        incomplete = {list(ids.tensors)[n] for n in missing.tolist()}
        box = next(box for box in missing_boxes(sources) if box.tensor in incomplete)
        raise WeightTransferError(f"no rank of the trainer holds {box}, which the rollout engines need")
    distances = np.array([[distance_by_host(source, layout) for source in sources] for layout in destinations])
    distances = distances.reshape(len(destinations), -1)
    selector = _SourceSelector(source_shards, source_template, holder_box, holder_shard, distances)
    sizes = np.array([element_bytes(name) for name in ids.dtypes], dtype=np.int64)
    moves = _moves(parts, shards, template, sizes, selector)
    for column, layouts in ((SOURCE_RANK, sources), (RANK, destinations)):
        moves[:, column] = np.array([layout.rank for layout in layouts], dtype=np.int64)[moves[:, column]]
    return Plan(
        tensors=tuple(ids.tensors),
        tensor_dims=np.array([len(shapes[name]) for name in ids.tensors], dtype=np.int64),
        locals=tuple(ids.locals),
        dtypes=tuple(ids.dtypes),
        part_tensor=wanted.tensor[box],
        start=start,
        shape=stop - start,
        source_shards=source_shards,
        shards=shards,
        moves=moves,
        unused=tuple(sorted(set(shapes) - set(names.values()))),
    )


@dataclass(frozen=True)
class _Parts:
    """The parts (P,) of the wanted boxes: the box of each (sorted), the held box that it is in, its elements."""

    wanted: BoxTable
    box: Ints
    held_box: Ints
    volume: Ints

    def incomplete_tensors(self) -> Ints:
        """The tensors of boxes that their parts do not fill."""
        filled = np.zeros(len(self.wanted.tensor), np.int64)
        np.add.at(filled, self.box, self.volume)
        return self.wanted.tensor[filled != (self.wanted.stop - self.wanted.start).prod(1)]

    def of_shards(self, shards: Ints) -> tuple[Ints, Ints]:
        """Every (position of a shard, part of its box) as two columns."""
        first = np.searchsorted(self.box, self.wanted.of_shard[shards], "left")
        return tables.join_ranges(first, np.searchsorted(self.box, self.wanted.of_shard[shards], "right") - first)


def _moves(parts: _Parts, shards: ShardTable, template: Ints, sizes: Ints, selector: "_SourceSelector") -> Ints:
    """The moves (C, 5) of a Plan with the positions of layouts for ranks; forced choices come before free ones."""
    moves_of_layouts, open_choices = list[Ints](), list[_OpenChoice]()
    begin = np.searchsorted(shards.template, np.arange(int(template.max(initial=-1)) + 2), "left")
    by_template = {}
    for position, own in enumerate(template.tolist()):
        if own not in by_template:
            rows = np.arange(begin[own], begin[own + 1])
            row, part = parts.of_shards(rows)
            num_bytes = parts.volume[part] * sizes[shards.dtype[rows[row]]]
            by_template[own] = (part, rows[row], num_bytes, selector.group_by_holders(parts.held_box[part]))
        part, shard, num_bytes, groups = by_template[own]
        moves = np.empty((len(part), 5), np.int64)
        moves[:, PART], moves[:, SHARD], moves[:, RANK] = part, shard, position
        moves_of_layouts.append(moves)
        for holders, members in groups:
            nearest = selector.nearest(holders, position)
            if len(nearest) == 1:
                moves[members, SOURCE_RANK] = nearest[0]
                selector.add_load(nearest[0], position, int(num_bytes[members].sum()))
            else:
                open_choices.append(_OpenChoice(position, nearest, moves, members, num_bytes[members]))
    for one in sorted(open_choices, key=lambda choice: len(choice.nearest)):
        one.moves[one.members, SOURCE_RANK] = selector.share(one.nearest, one.position, one.num_bytes)
    for moves in moves_of_layouts:
        moves[:, SOURCE_SHARD] = selector.shards_of(moves[:, SOURCE_RANK], parts.held_box[moves[:, PART]])
    return np.concatenate(moves_of_layouts) if moves_of_layouts else np.zeros((0, 5), np.int64)


class _OpenChoice(NamedTuple):
    """Rows `members` of the moves of the destination at a position, which any of the `nearest` sources may give."""

    position: int
    nearest: Ints
    moves: Ints
    members: Ints
    num_bytes: Ints


class _SourceSelector:
    """The source layouts that hold each disjoint box, and the choice of the one that gives it."""

    def __init__(
        self, shards: ShardTable, template: Ints, holder_box: Ints, holder_shard: Ints, distances: Ints
    ) -> None:
        """`template` (S,) of each layout, `distances` (destinations, S); (box, shard that holds it) as two columns."""
        self.template, self.distances = template, distances
        self.load = np.zeros(len(template), np.int64)
        self.num_boxes = int(holder_box.max(initial=-1)) + 1
        holder_template = shards.template[holder_shard].astype(np.int64)
        order = np.lexsort((holder_shard, holder_box, holder_template))
        keys = holder_template[order] * self.num_boxes + holder_box[order]
        first = np.concatenate([[True], keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, bool)
        self.keys, self.key_shards = keys[first], holder_shard[order][first]
        self.box_of_key, self.template_of_key = self.keys % self.num_boxes, self.keys // self.num_boxes
        marks = np.random.default_rng(11).integers(1 << 62, size=int(template.max(initial=-1)) + 1)
        self.signature = np.zeros(self.num_boxes, np.int64)
        with np.errstate(over="ignore"):
            np.add.at(self.signature, self.box_of_key, marks[self.template_of_key])
        self._holders: dict[int, Ints] = {}

    def group_by_holders(self, boxes: Ints) -> list[tuple[Ints, Ints]]:
        """(positions of layouts, positions of the boxes that exactly these layouts hold)."""
        marks, chosen, group = np.unique(self.signature[boxes], return_index=True, return_inverse=True)
        order = np.argsort(group, kind="stable")
        ends = np.searchsorted(group[order], np.arange(len(marks) + 1))
        return [
            (self._holders_of(int(mark), int(boxes[one])), order[a:b])
            for mark, one, a, b in zip(marks, chosen, ends[:-1], ends[1:], strict=True)
        ]

    def _holders_of(self, mark: int, box: int) -> Ints:
        if mark not in self._holders:
            self._holders[mark] = np.flatnonzero(np.isin(self.template, self.template_of_key[self.box_of_key == box]))
        return self._holders[mark]

    def nearest(self, holders: Ints, destination: int) -> Ints:
        """The holders with the smallest distance."""
        distances = self.distances[destination, holders]
        return holders[distances == distances.min()]

    def add_load(self, source: int, destination: int, num_bytes: int) -> None:
        """Count what a source gives; what stays on its own device uses no link."""
        if self.distances[destination, source]:
            self.load[source] += num_bytes

    def share(self, sources: Ints, destination: int, num_bytes: Ints) -> Ints:
        """A source for each copy, so that the loads of the sources come out as even as whole copies allow."""
        sources = sources[np.argsort(self.load[sources], kind="stable")]
        load, total = self.load[sources].astype(np.float64), float(num_bytes.sum())
        levels = (total + np.cumsum(load)) / np.arange(1, len(sources) + 1)
        used = int(np.flatnonzero(levels > load)[-1]) + 1
        ends = np.cumsum(levels[used - 1] - load[:used])
        middles = np.cumsum(num_bytes) - num_bytes / 2
        chosen = sources[np.minimum(np.searchsorted(ends, middles), used - 1)]
        for source in sources[:used]:
            self.add_load(source, destination, int(num_bytes[chosen == source].sum()))
        return chosen

    def shards_of(self, sources: Ints, boxes: Ints) -> Ints:
        """The shard of each source that holds the box."""
        return self.key_shards[np.searchsorted(self.keys, self.template[sources] * self.num_boxes + boxes)]
