"""A copy plan from source and destination layouts: the smallest set of copies that fills every destination once.

Pure arithmetic on layouts. Where several source ranks hold the same elements, the nearest ones give them, and equally
near ones share them by the bytes that each has to give already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rlsys.types import Shapes, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.utils.grouping import group_by
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
"""The columns of `Plan.moves`; SHARD and RANK are the destination's."""


@dataclass(frozen=True)
class Plan:
    """All copies of a transfer as columns, and the source tensors that no destination wants.

    `moves` (C, 5) has a row for each copy: a part, and by which shards of which ranks it is given and taken. Part p is
    the box of `shape` (P, D) from `start` (P, D) of the tensor `part_tensor` (P,). Tensors, local tensors and dtypes
    are numbers that index `tensors`, of `tensor_dims` dimensions, `locals` and `dtypes`.
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
        """An id for every copy (C,), equal for copies of the same elements and dtype; the first copy of each id."""
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


def resolve_names(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> dict[str, str]:
    """The sources' name of each destination tensor, by the tied names of both sides.

    Raises WeightTransferError for a tensor that the sources do not have, or have in another shape.
    """
    held, source_aliases = full_shapes(sources), tables.merged(layout.aliases for layout in sources)
    held_as = tables.merged(layout.aliases for layout in destinations)
    aliases = group_by(sorted(held_as), held_as.__getitem__)
    names: dict[str, str] = {}
    for name, shape in full_shapes(destinations).items():
        candidates = [other for tied in (name, *aliases.get(name, ())) for other in (tied, source_aliases.get(tied))]
        source = next((candidate for candidate in candidates if candidate in held), None)
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


def full_shapes(layouts: Sequence[WeightLayout]) -> Shapes:
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
    source_templates, template_of_source = tables.find_templates(sources)
    templates, template_of_destination = tables.find_templates(destinations)
    ids = NameIds()
    dims = max([1, *(len(shard.local_start) for layout in (*source_templates, *templates) for shard in layout.shards)])
    shards = tables.shard_table(templates, names, dims, ids)
    source_shards = tables.shard_table(source_templates, {name: name for name in shapes}, dims, ids)
    wanted, given = (tables.distinct_boxes(side.tensor, side.start, side.stop) for side in (shards, source_shards))
    held, holder_box, holder_shard = tables.disjoint_boxes(given, source_shards)
    wanted_box, held_box, start, stop = tables.intersections(wanted, held)
    parts = _Parts(wanted, wanted_box, held_box, (stop - start).prod(1))
    if len(missing := parts.incomplete_tensors()):
        incomplete = {list(ids.tensors)[n] for n in missing.tolist()}
        box = next(box for box in missing_boxes(sources) if box.tensor in incomplete)
        raise WeightTransferError(f"no rank of the trainer holds {box}, which the rollout engines need")
    # 0 for the same rank of the same host (colocated), 1 for the same host, 2 for another host
    distances = np.array([[2 if a.host != b.host else int(a.rank != b.rank) for a in sources] for b in destinations])
    distances = distances.reshape(len(destinations), -1)
    selector = _SourceSelector(source_shards, template_of_source, holder_box, holder_shard, distances)
    widths = np.array([element_bytes(name) for name in ids.dtypes], dtype=np.int64)
    moves = _moves(parts, shards, template_of_destination, widths, selector)
    for column, layouts in ((SOURCE_RANK, sources), (RANK, destinations)):  # positions of layouts become their ranks
        moves[:, column] = np.array([layout.rank for layout in layouts], dtype=np.int64)[moves[:, column]]
    return Plan(
        tensors=tuple(ids.tensors),
        tensor_dims=np.array([len(shapes[name]) for name in ids.tensors], dtype=np.int64),
        locals=tuple(ids.locals),
        dtypes=tuple(ids.dtypes),
        part_tensor=wanted.tensor[wanted_box],
        start=start,
        shape=stop - start,
        source_shards=source_shards,
        shards=shards,
        moves=moves,
        unused=tuple(sorted(set(shapes) - set(names.values()))),
    )


class _Parts(NamedTuple):
    """The parts (P,) that wanted boxes consist of: where they meet the boxes that the sources hold.

    Of each part the wanted box, by which parts are sorted, the held box, and its number of elements.
    """

    wanted: BoxTable
    wanted_box: Ints
    held_box: Ints
    volume: Ints

    def incomplete_tensors(self) -> Ints:
        """The tensors of boxes that their parts do not fill."""
        filled = np.zeros(len(self.wanted.tensor), np.int64)
        np.add.at(filled, self.wanted_box, self.volume)
        return self.wanted.tensor[filled != (self.wanted.stop - self.wanted.start).prod(1)]

    def of_shards(self, shards: Ints) -> tuple[Ints, Ints]:
        """Every (position in `shards`, part of the box of that shard) as two columns."""
        boxes = self.wanted.of_shard[shards]
        first = np.searchsorted(self.wanted_box, boxes, "left")
        return tables.join_ranges(first, np.searchsorted(self.wanted_box, boxes, "right") - first)


def _moves(parts: _Parts, shards: ShardTable, template_of: Ints, widths: Ints, selector: "_SourceSelector") -> Ints:
    """The moves (C, 5) of a Plan, with the positions of layouts in place of ranks.

    Parts with one nearest source are assigned first: their loads are known when those with several are shared out,
    the ones with the fewest nearest sources before the others. `template_of` has the template of each destination,
    `widths` the bytes of an element of each dtype.
    """
    moves_of_layouts, open_choices = list[Ints](), list[_OpenChoice]()
    begin = np.searchsorted(shards.template, np.arange(int(template_of.max(initial=-1)) + 2), "left")
    by_template = {}
    for position, own in enumerate(template_of.tolist()):
        if own not in by_template:
            own_shards = np.arange(begin[own], begin[own + 1])
            at, part = parts.of_shards(own_shards)
            shard = own_shards[at]
            num_bytes = parts.volume[part] * widths[shards.dtype[shard]]
            by_template[own] = part, shard, num_bytes, selector.group_by_holders(parts.held_box[part])
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
    for choice in sorted(open_choices, key=lambda choice: len(choice.nearest)):
        choice.moves[choice.members, SOURCE_RANK] = selector.share(choice.nearest, choice.position, choice.num_bytes)
    for moves in moves_of_layouts:
        moves[:, SOURCE_SHARD] = selector.shards_of(moves[:, SOURCE_RANK], parts.held_box[moves[:, PART]])
    return np.concatenate(moves_of_layouts) if moves_of_layouts else np.zeros((0, 5), np.int64)


class _OpenChoice(NamedTuple):
    """Rows `members` of the `moves` of a destination, by its position, which any of the `nearest` sources may give."""

    position: int
    nearest: Ints
    moves: Ints
    members: Ints
    num_bytes: Ints


class _SourceSelector:
    """The source layouts that hold each disjoint box, and the choice of the one that gives it.

    Layouts are called by their positions. `load` (S,) counts the bytes that each gives over a link.
    """

    def __init__(
        self, shards: ShardTable, template_of: Ints, holder_box: Ints, holder_shard: Ints, distances: Ints
    ) -> None:
        """`template_of` (S,) the layouts, their `distances` (destinations, S); (box, shard with it) as two columns."""
        self.template_of, self.distances = template_of, distances
        self.load = np.zeros(len(template_of), np.int64)
        self.num_boxes = int(holder_box.max(initial=-1)) + 1
        # `keys`: every (template, box that it holds) once, as one sorted number, and the shard that holds the box
        holder_template = shards.template[holder_shard].astype(np.int64)
        order = np.lexsort((holder_shard, holder_box, holder_template))
        keys = holder_template[order] * self.num_boxes + holder_box[order]
        first = np.concatenate([[True], keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, bool)
        self.keys, self.key_shards = keys[first], holder_shard[order][first]
        self.box_of_key, self.template_of_key = self.keys % self.num_boxes, self.keys // self.num_boxes
        # `signature`: a hash of the set of templates that hold a box, the sum of a random number for each of them
        marks = np.random.default_rng(11).integers(1 << 62, size=int(template_of.max(initial=-1)) + 1)
        self.signature = np.zeros(self.num_boxes, np.int64)
        with np.errstate(over="ignore"):
            np.add.at(self.signature, self.box_of_key, marks[self.template_of_key])
        self._holders: dict[int, Ints] = {}
        """The layouts that hold a box, by its signature."""

    def group_by_holders(self, boxes: Ints) -> list[tuple[Ints, Ints]]:
        """The boxes by the layouts that hold them: (these layouts, positions in `boxes`) of each group."""
        signatures, example, group = np.unique(self.signature[boxes], return_index=True, return_inverse=True)
        order = np.argsort(group, kind="stable")
        ends = np.searchsorted(group[order], np.arange(len(signatures) + 1))
        return [
            (self._holders_of(int(signature), int(boxes[first])), order[begin:end])
            for signature, first, begin, end in zip(signatures, example, ends[:-1], ends[1:], strict=True)
        ]

    def _holders_of(self, signature: int, box: int) -> Ints:
        """The layouts that hold the boxes of a signature, of which `box` is one."""
        if signature not in self._holders:
            templates = self.template_of_key[self.box_of_key == box]
            self._holders[signature] = np.flatnonzero(np.isin(self.template_of, templates))
        return self._holders[signature]

    def nearest(self, holders: Ints, destination: int) -> Ints:
        """The holders with the smallest distance."""
        distances = self.distances[destination, holders]
        return holders[distances == distances.min()]

    def add_load(self, source: int, destination: int, num_bytes: int) -> None:
        """Count what a source gives; what stays on its own device uses no link."""
        if self.distances[destination, source]:
            self.load[source] += num_bytes

    def share(self, sources: Ints, destination: int, num_bytes: Ints) -> Ints:
        """A source for each copy, so that the loads of the sources come out as even as whole copies allow.

        Water-filling: the bytes raise the least loaded sources to one level. Laid end to end, the copies are cut into
        the sources' shares, and each copy is given by the source in whose share its middle is.
        """
        sources = sources[np.argsort(self.load[sources], kind="stable")]
        load, total = self.load[sources].astype(np.float64), float(num_bytes.sum())
        levels = (total + np.cumsum(load)) / np.arange(1, len(sources) + 1)  # where the first n sources take all
        num_used = int(np.flatnonzero(levels > load)[-1]) + 1  # more would have to be above the level already
        share_ends = np.cumsum(levels[num_used - 1] - load[:num_used])
        middles = np.cumsum(num_bytes) - num_bytes / 2
        chosen = sources[np.minimum(np.searchsorted(share_ends, middles), num_used - 1)]
        for source in sources[:num_used]:
            self.add_load(source, destination, int(num_bytes[chosen == source].sum()))
        return chosen

    def shards_of(self, sources: Ints, boxes: Ints) -> Ints:
        """The shard of each source that holds the box beside it."""
        return self.key_shards[np.searchsorted(self.keys, self.template_of[sources] * self.num_boxes + boxes)]
