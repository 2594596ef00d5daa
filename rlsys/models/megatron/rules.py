"""The vocabulary of the family tables: how tensors of a Hugging Face checkpoint make up one Megatron parameter.

A rule names a parameter, the HF tensors it is made of with their dimensions, and one of the functions below, which
yields the boxes that part `index.number` of `index.of` equal parts holds, each with its place in the parameter. The
rules themselves are in rules.toml.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from rlsys.types import Box, Shapes, Shard
from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError
from rlsys.utils.grouping import group_by

Dims = Mapping[str, int]
"""A model's dimensions by the names that rules use."""
NamedShapes = Sequence[tuple[str, tuple[int, ...]]]
PlacedBox = tuple[Box, tuple[int, ...]]
"""A box of an HF tensor and where it starts in the Megatron parameter."""
Run = tuple[str, int, int, tuple[int, ...]]
"""Rows of an HF tensor: its name, the first, how many, and the other dimensions."""


@dataclass(frozen=True)
class ShardIndex:
    """Part `number` of `of` equal parts, of a model with these dimensions."""

    number: int
    of: int
    dims: Dims


ShardFn = Callable[[NamedShapes, ShardIndex], Iterator[PlacedBox]]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter. `hf` names each tensor with its dimensions, as "self_attn.o_proj.weight [hidden, q]".

    `te` is the parameter's name in the Transformer Engine spec and `te_shard_fn` how it is split there, where they
    differ. The rule holds for models whose dimension `when` is not zero.
    """

    local: str
    shard_fn: ShardFn
    hf: tuple[str, ...]
    te: str = ""
    te_shard_fn: ShardFn | None = None
    when: str = ""

    @cached_property
    def named(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each HF tensor's name and the names of its dimensions."""
        parts = (text.removesuffix("]").split(" [") for text in self.hf)
        return tuple((name, tuple(size.strip() for size in sizes.split(","))) for name, sizes in parts)

    def parts(self, dims: Dims) -> list[tuple[str, tuple[int, ...]]]:
        """Each HF tensor's name and full shape."""
        return [(name, tuple(1 if d == "1" else dims[d] for d in named)) for name, named in self.named]


def whole(parts: NamedShapes, index: ShardIndex) -> Iterator[PlacedBox]:
    """Every rank holds all of it."""
    yield from ((Box(name, (0,) * len(shape), shape), (0,) * len(shape)) for name, shape in parts)


def rows(parts: NamedShapes, index: ShardIndex) -> Iterator[PlacedBox]:
    """An equal part of the first dimension of each tensor, one below the other: a gate above its up projection."""
    at = 0
    for name, shape in parts:
        box = _part(name, shape, 0, index)
        yield box, (at, *box.start[1:])
        at += box.shape[0]


def columns(parts: NamedShapes, index: ShardIndex) -> Iterator[PlacedBox]:
    """An equal part of the last dimension."""
    ((name, shape),) = parts
    yield _part(name, shape, len(shape) - 1, index), (0,) * len(shape)


def padded_rows(parts: NamedShapes, index: ShardIndex) -> Iterator[PlacedBox]:
    """Parts of the rows after padding them to a multiple; padding rows belong to no tensor."""
    ((name, shape),) = parts
    each = ceil(shape[0] / index.of)
    start = min(index.number * each, shape[0])
    size = min(each, shape[0] - start)
    if size:
        yield Box(name, (start, *(0,) * (len(shape) - 1)), (size, *shape[1:])), (0,) * len(shape)


def grouped(parts: NamedShapes, index: ShardIndex) -> Iterator[PlacedBox]:
    """Equal parts of queries, keys and values interleaved by group: a group's queries, its key, its value.

    With fewer groups than parts a part is a run of rows inside a group, as Megatron cuts it.
    """
    heads = index.dims["groups"]
    sizes = [(name, shape[0] // heads, shape[1:]) for name, shape in parts]
    return _equal_part([(name, g * n, n, rest) for g in range(heads) for name, n, rest in sizes], index)


def gated_grouped(parts: NamedShapes, index: ShardIndex) -> Iterator[PlacedBox]:
    """As `grouped`, with a gate below the queries of a group; HF has each head's gate below its query."""
    (query, (num_rows, *rest)), *others = parts
    groups, heads = index.dims["groups"], index.dims["heads"]
    size, each = num_rows // (2 * heads), heads // groups
    runs: list[Run] = []
    for group in range(groups):
        own = range(group * each, (group + 1) * each)
        runs += [(query, (2 * head + half) * size, size, tuple(rest)) for half in range(2) for head in own]
        runs += [(name, group * shape[0] // groups, shape[0] // groups, shape[1:]) for name, shape in others]
    return _equal_part(runs, index)


def regrouped(*splits: tuple[str, ...]) -> ShardFn:
    """Tensors whose rows are groups, each split as these dimensions say: a rank holds, one below the other, its equal
    part of the first split of all groups, of the second, and so on."""

    def shard(parts: NamedShapes, index: ShardIndex) -> Iterator[PlacedBox]:
        at = 0
        for (name, (num_rows, *rest)), split in zip(parts, splits, strict=True):
            sizes = [index.dims[size] for size in split]
            groups = range(0, num_rows, sum(sizes))
            for number, size in enumerate(sizes):
                runs = [(name, group + sum(sizes[:number]), size, tuple(rest)) for group in groups]
                yield from ((box, (at + start[0], *start[1:])) for box, start in _equal_part(runs, index))
                at += size * len(groups) // index.of

    return shard


def _equal_part(runs: Sequence[Run], index: ShardIndex) -> Iterator[PlacedBox]:
    """An equal part of the rows of these runs, one below the other."""
    each = _divided(sum(size for _, _, size, _ in runs), index.of, runs[0][0])
    first, last = index.number * each, (index.number + 1) * each
    at = 0
    for name, start, size, rest in runs:
        low, high = max(first, at), min(last, at + size)
        if low < high:
            tail = (0,) * len(rest)
            yield Box(name, (start + low - at, *tail), (high - low, *rest)), (low - first, *tail)
        at += size


_SPLITS: Mapping[str, ShardFn] = {fn.__name__: fn for fn in (whole, rows, columns, padded_rows, grouped, gated_grouped)}
_GROUPS = read_table(__file__, "rules.toml")


def rules_of(*groups: str) -> tuple[Rule, ...]:
    """The rules of these groups of rules.toml."""
    return tuple(_rule(local, **entry) for group in groups for local, entry in _GROUPS[group].items())


def _rule(
    local: str, split: str | list[list[str]], hf: Sequence[str], te: str = "", te_split: str = "", when: str = ""
) -> Rule:
    shard_fn = _SPLITS[split] if isinstance(split, str) else regrouped(*map(tuple, split))
    return Rule(local, shard_fn, tuple(hf), te, _SPLITS[te_split] if te_split else None, when)


def by_local(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    """The shards of each local tensor."""
    return group_by(shards, lambda shard: shard.local)


def extents(shards: Iterable[Shard]) -> Shapes:
    """How far the shards reach in each local tensor."""
    return _farthest((shard.local, shard.local_start, shard.box.shape) for shard in shards)


def whole_shapes(shards: Iterable[Shard]) -> Shapes:
    """The full shape of each HF tensor that the shards make up, in their order."""
    return _farthest((shard.box.tensor, shard.box.start, shard.box.shape) for shard in shards)


def _farthest(boxes: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> Shapes:
    """The farthest ends of boxes (tensor, start, shape) by tensor."""
    ends: dict[str, tuple[int, ...]] = {}
    for tensor, start, shape in boxes:
        end = tuple(at + n for at, n in zip(start, shape, strict=True))
        ends[tensor] = tuple(map(max, end, ends.get(tensor, end)))
    return ends


def _part(name: str, shape: tuple[int, ...], dim: int, index: ShardIndex) -> Box:
    each = _divided(shape[dim], index.of, name)
    start = tuple(index.number * each if d == dim else 0 for d in range(len(shape)))
    return Box(name, start, (*shape[:dim], each, *shape[dim + 1 :]))


def _divided(size: int, parts: int, name: str) -> int:
    if size % parts:
        raise ConfigError(f"{name}: {size} is not divisible into {parts} tensor-parallel parts")
    return size // parts
