"""From who holds what to who sends what: the smallest set of copies that fills every destination box once.

Pure arithmetic on layouts. Where several source ranks hold the same elements, the nearest ones give them, and equally
near ones share the giving by the bytes that each has to give already.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from rlsys.types import Box, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights import tables
from rlsys.weights.layout import element_bytes, subtract_all
from rlsys.weights.tables import Boxes, Ints, Numbers, Rows

Distance = Callable[[WeightLayout, WeightLayout], int]
FORMAT = 1


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
    def box(self) -> Box:
        return Box(self.tensor, self.start, self.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * element_bytes(self.dtype)


@dataclass(frozen=True)
class Places:
    """Where boxes lie, one row each: local tensor, start there, its dimensions, its dtype, start of the box."""

    local: Ints
    local_start: Ints
    local_dims: Ints
    dtype: Ints
    box_start: Ints


@dataclass(frozen=True)
class Plan:
    """All copies of a transfer as columns, and the source tensors that no destination wants.

    `moves` (C, 5) are, for each copy: piece, source place, place, source rank, rank; a piece is the part `shape` (P, D)
    of a tensor from `start`. All numbers index the tables of names.
    """

    tensors: tuple[str, ...]
    tensor_dims: Ints
    locals: tuple[str, ...]
    dtypes: tuple[str, ...]
    piece_tensor: Ints
    start: Ints
    shape: Ints
    source_places: Places
    places: Places
    moves: Ints
    unused: tuple[str, ...]

    @property
    def num_copies(self) -> int:
        return len(self.moves)

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(self._copies(self.moves))

    @cached_property
    def copy_bytes(self) -> Ints:
        """The bytes of every copy (C,)."""
        sizes = np.array([element_bytes(name) for name in self.dtypes], dtype=np.int64)
        return self.shape.prod(1)[self.moves[:, 0]] * sizes[self.places.dtype[self.moves[:, 2]]]

    @cached_property
    def num_bytes(self) -> int:
        return int(self.copy_bytes.sum())

    def from_rank(self, rank: int) -> tuple[Copy, ...]:
        return tuple(self._copies(self.moves[self.moves[:, 3] == rank]))

    def bytes_by_link(self) -> dict[tuple[int, int], int]:
        """Bytes from each source rank to each destination rank."""
        keys = self.moves[:, 3] << 32 | self.moves[:, 4]
        links, of_copy = np.unique(keys, return_inverse=True)
        totals = np.zeros(len(links), np.int64)
        np.add.at(totals, of_copy.reshape(-1), self.copy_bytes)
        return {(int(k) >> 32, int(k) & 0xFFFFFFFF): int(n) for k, n in zip(links, totals, strict=True)}

    @cached_property
    def checksum_ids(self) -> tuple[Ints, Ints]:
        """An id for every copy (C,), the same for the same elements and dtype, and the first copy of each id."""
        keys = self.moves[:, 0] * len(self.dtypes) + self.places.dtype[self.moves[:, 2]]
        _, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
        return numbers.reshape(-1), first

    def select(self, chosen: Ints) -> tuple[Copy, ...]:
        """The copies at these positions."""
        return tuple(self._copies(self.moves[chosen]))

    def to_json(self) -> str:
        """The plan as text; `from_json` gives it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "names": {"tensors": self.tensors, "locals": self.locals, "dtypes": self.dtypes},
                "tensor_dims": self.tensor_dims.tolist(),
                "pieces": [self.piece_tensor.tolist(), self.start.tolist(), self.shape.tolist()],
                "source_places": [column.tolist() for column in vars(self.source_places).values()],
                "places": [column.tolist() for column in vars(self.places).values()],
                "moves": self.moves.tolist(),
                "unused": self.unused,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """ValueError when the text is no plan of this format."""
        read = json.loads(text)
        if not isinstance(read, dict) or read.get("format") != FORMAT:
            raise ValueError(f"this is no weight plan of format {FORMAT}")

        def table(rows: list) -> Ints:
            return np.array(rows, dtype=np.int64).reshape(len(rows), -1)

        def places(columns: list) -> Places:
            local, local_start, dims, dtype, box_start = columns
            return Places(np.array(local), table(local_start), np.array(dims), np.array(dtype), table(box_start))

        tensor, start, shape = read["pieces"]
        return cls(
            **{name: tuple(values) for name, values in read["names"].items()},
            tensor_dims=np.array(read["tensor_dims"]),
            piece_tensor=np.array(tensor),
            start=table(start),
            shape=table(shape),
            source_places=places(read["source_places"]),
            places=places(read["places"]),
            moves=table(read["moves"]).reshape(-1, 5),
            unused=tuple(read["unused"]),
        )

    def _copies(self, moves: Ints) -> Iterator[Copy]:
        piece, source, place, source_rank, rank = moves.T
        start, shape = self.start[piece], self.shape[piece]
        given, taken = self.source_places, self.places
        columns = (
            self.piece_tensor[piece],
            start,
            shape,
            source_rank,
            given.local[source],
            given.local_start[source] + start - given.box_start[source],
            given.local_dims[source],
            given.dtype[source],
            rank,
            taken.local[place],
            taken.local_start[place] + start - taken.box_start[place],
            taken.local_dims[place],
            taken.dtype[place],
        )
        dims = start.shape[1]
        for t, at, n, s, sl, ss, sd, st, r, ln, ls, ld, lt in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            own = dims - int(self.tensor_dims[t])
            yield Copy(
                self.tensors[t],
                tuple(at[own:]),
                tuple(n[own:]),
                s,
                self.locals[sl],
                tuple(ss[dims - sd :]),
                self.dtypes[st],
                r,
                self.locals[ln],
                tuple(ls[dims - ld :]),
                self.dtypes[lt],
            )


def distance_by_host(source: WeightLayout, destination: WeightLayout) -> int:
    """0 for the same rank of the same host (colocated), 1 for the same host, 2 for another host."""
    return 2 if source.host != destination.host else int(source.rank != destination.rank)


def resolve_names(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> dict[str, str]:
    """Under which name the sources hold each destination tensor, by the tied names of both sides.

    Raises WeightTransferError for a tensor that the sources do not have, or have in another shape.
    """
    held = {name: tuple(shape) for shapes in _shapes(sources) for name, shape in shapes.items()}
    tied_there = {alias: name for names in _aliases(sources) for alias, name in names.items()}
    tied_here: dict[str, list[str]] = defaultdict(list)
    for aliases in _aliases(destinations):
        for alias, name in aliases.items():
            tied_here[name].append(alias)
    names: dict[str, str] = {}
    for shapes in _shapes(destinations):
        for name, shape in shapes.items():
            if name in names:
                continue
            wanted = [name, *sorted(set(tied_here[name]))] if name in tied_here else [name]
            found = next((n for w in wanted for n in (w, tied_there.get(w)) if n in held), None)
            if found is None:
                raise WeightTransferError(f"the trainer has no tensor '{name}' (of shape {tuple(shape)})")
            if held[found] != tuple(shape):
                both = f"{held[found]} at the trainer, {tuple(shape)} at the rollout engine"
                raise WeightTransferError(f"tensor '{name}' has two shapes: {both}")
            names[name] = found
    return names


def source_dtypes(names: Mapping[str, str], destinations: Sequence[WeightLayout]) -> dict[str, str]:
    """The engines' dtypes (the first engine's where they differ) by the sources' names, see `resolve_names`."""
    return {names[name]: dtype for layout in reversed(destinations) for name, dtype in layout.dtypes.items()}


def _shapes(layouts: Sequence[WeightLayout]) -> list[Mapping[str, tuple[int, ...]]]:
    return tables.unique_mappings([layout.full_shapes for layout in tables.unique_layouts(layouts)])


def _aliases(layouts: Sequence[WeightLayout]) -> list[Mapping[str, str]]:
    return tables.unique_mappings([layout.aliases for layout in tables.unique_layouts(layouts)])


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
    givers, giver_of = tables.templates_of(sources)
    takers, taker_of = tables.templates_of(destinations)
    dims = tables.num_dims([*givers, *takers])
    tensors, locals_, dtypes = Numbers(), Numbers(), Numbers()
    taken = tables.rows_of(takers, names, dims, tensors, locals_, dtypes)
    given = tables.rows_of(givers, None, dims, tensors, locals_, dtypes)
    wanted = tables.boxes_of(taken)
    atoms, holder_atom, holder_row = tables.atoms_of(tables.boxes_of(given), given)
    box, atom, start, stop = tables.meet(wanted, atoms)
    _check_covered(wanted, box, start, stop, atoms, list(tensors), sources, destinations, names)
    far = np.array([[distance(source, layout) for source in sources] for layout in destinations])
    chooser = _Chooser(given, np.array(giver_of), holder_atom, holder_row, far.reshape(len(destinations), -1))
    sizes = np.array([element_bytes(name) for name in dtypes], dtype=np.int64)
    moves = _moves(taken, wanted, taker_of, box, atom, (stop - start).prod(1), sizes, chooser)
    moves[:, 3] = np.array([layout.rank for layout in sources], dtype=np.int64)[moves[:, 3]]
    moves[:, 4] = np.array([layout.rank for layout in destinations], dtype=np.int64)[moves[:, 4]]
    shapes = {name: shape for found in _shapes(sources) for name, shape in found.items()}
    return Plan(
        tensors=tuple(tensors),
        tensor_dims=np.array([len(shapes[name]) for name in tensors], dtype=np.int64),
        locals=tuple(locals_),
        dtypes=tuple(dtypes),
        piece_tensor=wanted.tensor[box],
        start=start,
        shape=stop - start,
        source_places=_places(given),
        places=_places(taken),
        moves=moves,
        unused=tuple(sorted(set(shapes) - set(names.values()))),
    )


def _places(rows: Rows) -> Places:
    return Places(rows.local, rows.local_start, rows.local_dims, rows.dtype, rows.start)


def _moves(
    taken: Rows,
    wanted: Boxes,
    taker_of: Sequence[int],
    box: Ints,
    atom: Ints,
    volume: Ints,
    sizes: Ints,
    chooser: _Chooser,
) -> Ints:
    """The moves (C, 5) of a Plan with the positions of layouts for ranks; forced choices come before free ones."""
    first = np.searchsorted(box, np.arange(len(wanted.tensor)), "left")
    count = np.searchsorted(box, np.arange(len(wanted.tensor)), "right") - first
    parts, open_choices = [], []
    begin = np.searchsorted(taken.template, np.arange(max(taker_of, default=-1) + 2), "left")
    templates = {}
    for number, template in enumerate(taker_of):
        if template not in templates:
            rows = np.arange(begin[template], begin[template + 1])
            of_row = wanted.of_row[rows]
            row, piece = tables._join(first[of_row], count[of_row])
            num_bytes = volume[piece] * sizes[taken.dtype[rows[row]]]
            templates[template] = (piece, rows[row], num_bytes, chooser.segments(atom[piece]))
        piece, place, num_bytes, segments = templates[template]
        moves = np.empty((len(piece), 5), np.int64)
        moves[:, 0], moves[:, 2], moves[:, 4] = piece, place, number
        parts.append(moves)
        for holders, members in segments:
            near = chooser.nearest(holders, number)
            if len(near) == 1:
                moves[members, 3] = near[0]
                chooser.count(near[0], number, int(num_bytes[members].sum()))
            else:
                open_choices.append((len(near), len(open_choices), number, near, moves, members, num_bytes))
    for _, _, number, near, moves, members, num_bytes in sorted(open_choices, key=lambda choice: choice[:2]):
        moves[members, 3] = chooser.share(near, number, num_bytes[members])
    for moves in parts:
        moves[:, 1] = chooser.rows(moves[:, 3], atom[moves[:, 0]])
    return np.concatenate(parts) if parts else np.zeros((0, 5), np.int64)


class _Chooser:
    """Which source layouts hold an atom, and which of them gives it."""

    def __init__(self, given: Rows, giver_of: Ints, holder_atom: Ints, holder_row: Ints, far: Ints) -> None:
        self.giver_of, self.far = giver_of, far
        self.load = np.zeros(len(giver_of), np.int64)
        self.num_atoms = int(holder_atom.max(initial=-1)) + 1
        template = given.template[holder_row].astype(np.int64)
        order = np.lexsort((holder_row, holder_atom, template))
        keys = template[order] * self.num_atoms + holder_atom[order]
        first = np.concatenate([[True], keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, bool)
        self.keys, self.key_rows = keys[first], holder_row[order][first]
        self.atom_of_key, self.template_of_key = self.keys % self.num_atoms, self.keys // self.num_atoms
        marks = np.random.default_rng(11).integers(1 << 62, size=int(giver_of.max(initial=-1)) + 1)
        signature = np.zeros(self.num_atoms, np.int64)
        with np.errstate(over="ignore"):
            np.add.at(signature, self.atom_of_key, marks[self.template_of_key])
        self.signature, self.by_atom = signature, np.argsort(self.atom_of_key, kind="stable")
        self.atom_first = np.searchsorted(self.atom_of_key[self.by_atom], np.arange(self.num_atoms + 1))
        self._holders: dict[int, Ints] = {}

    def segments(self, atoms: Ints) -> list[tuple[Ints, Ints]]:
        """The positions of atoms that the same layouts hold, and those layouts' positions."""
        marks, chosen, group = np.unique(self.signature[atoms], return_index=True, return_inverse=True)
        order = np.argsort(group, kind="stable")
        ends = np.searchsorted(group[order], np.arange(len(marks) + 1))
        return [
            (self._held_by(int(mark), int(atoms[one])), order[a:b])
            for mark, one, a, b in zip(marks, chosen, ends[:-1], ends[1:], strict=True)
        ]

    def _held_by(self, mark: int, atom: int) -> Ints:
        if mark not in self._holders:
            keys = self.by_atom[self.atom_first[atom] : self.atom_first[atom + 1]]
            self._holders[mark] = np.flatnonzero(np.isin(self.giver_of, self.template_of_key[keys]))
        return self._holders[mark]

    def nearest(self, holders: Ints, destination: int) -> Ints:
        far = self.far[destination, holders]
        return holders[far == far.min()]

    def count(self, source: int, destination: int, num_bytes: int) -> None:
        """Note what a source gives; what it gives itself burdens nobody's link."""
        if self.far[destination, source]:
            self.load[source] += num_bytes

    def share(self, near: Ints, destination: int, num_bytes: Ints) -> Ints:
        """A source for each copy, so that the loads of the near ones come out as even as whole copies allow."""
        near = near[np.argsort(self.load[near], kind="stable")]
        load, total = self.load[near].astype(np.float64), float(num_bytes.sum())
        levels = (total + np.cumsum(load)) / np.arange(1, len(near) + 1)
        used = int(np.flatnonzero(levels > load)[-1]) + 1
        ends = np.cumsum(levels[used - 1] - load[:used])
        middles = np.cumsum(num_bytes) - num_bytes / 2
        chosen = near[np.minimum(np.searchsorted(ends, middles), used - 1)]
        for source in near[:used]:
            self.count(source, destination, int(num_bytes[chosen == source].sum()))
        return chosen

    def rows(self, sources: Ints, atoms: Ints) -> Ints:
        """The row of each source that holds the atom."""
        return self.key_rows[np.searchsorted(self.keys, self.giver_of[sources] * self.num_atoms + atoms)]


def _check_covered(
    wanted: Boxes,
    box: Ints,
    start: Ints,
    stop: Ints,
    atoms: Boxes,
    tensors: Sequence[str],
    sources: Sequence[WeightLayout],
    destinations: Sequence[WeightLayout],
    names: Mapping[str, str],
) -> None:
    """WeightTransferError naming the first box that no source holds and who wants it."""
    found = np.zeros(len(wanted.tensor), np.int64)
    np.add.at(found, box, (stop - start).prod(1))
    lacking = {tensors[n] for n in wanted.tensor[found != wanted.volume].tolist()}
    if not lacking:
        return
    for layout in destinations:
        for shard in layout.shards:
            if names[shard.box.tensor] in lacking:
                missing = [Box(names[shard.box.tensor], shard.box.start, shard.box.shape)]
                for held in (s.box for source in sources for s in source.shards if s.box.tensor == missing[0].tensor):
                    missing = subtract_all(missing, held)
                    if not missing:
                        break
                if missing:
                    who = f"which rollout rank {layout.rank} wants"
                    raise WeightTransferError(f"no rank of the trainer holds {missing[0]}, {who}")
    raise AssertionError("a box lacks elements that some source holds")
