"""Boxes and plans on random layouts: any partition, replicas, padded and stacked local tensors, tied names, dtypes."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.boxes import overlap
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.layout import (
    check_complete,
    missing_boxes,
    num_elements,
    shard_view,
    subtract,
    view_of,
    whole_box,
)
from rlsys.weights.plan import Plan, make_plan
from rlsys.weights.verify import layout_checksums, merge_rank_checksums
from scripts.weight_layouts import bytes_by_link


@dataclass
class Rank:
    """A rank's layout and its local tensors."""

    layout: WeightLayout
    tensors: dict[str, Tensor]


def boxes_of(rng: random.Random, name: str, shape: tuple[int, ...]) -> list[Box]:
    """A random grid over the tensor, uneven."""
    cuts = []
    for size in shape:
        inner = rng.sample(range(1, size), k=min(rng.choice([0, 0, 1, 2]), size - 1)) if size > 1 else []
        cuts.append(list(pairwise([0, *sorted(inner), size])))
    return [Box(name, tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*cuts)]


def place(rng: random.Random, shard_boxes: list[Box], dtype: torch.dtype) -> tuple[list[Shard], dict[str, Tensor]]:
    """Put boxes into local tensors: alone, inside a larger one, or as one entry of a stack."""
    shards, tensors = [], dict[str, Tensor]()
    for number, box in enumerate(shard_boxes):
        local, kind = f"local.{number}", rng.choice(["alone", "padded", "stacked"])
        if kind == "alone":
            tensors[local], start = torch.zeros(box.shape, dtype=dtype), (0,) * len(box.shape)
        elif kind == "padded":
            start = tuple(rng.randint(0, 2) for _ in box.shape)
            tensors[local] = torch.zeros([a + n + 1 for a, n in zip(start, box.shape, strict=True)], dtype=dtype)
        else:
            start = (rng.randint(0, 2), *(0 for _ in box.shape))
            tensors[local] = torch.zeros((3, *box.shape), dtype=dtype)
        shards.append(Shard(box, local, start))
    return shards, tensors


def ranks_of(
    rng: random.Random, shapes: Mapping[str, tuple[int, ...]], num_ranks: int, dtype: str, hosts: int
) -> list[Rank]:
    """Every box on one rank or several; some ranks have nothing of a tensor."""
    held: list[list[Box]] = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        for box in boxes_of(rng, name, shape):
            for rank in rng.sample(range(num_ranks), k=rng.choice([1, 1, min(2, num_ranks), num_ranks])):
                held[rank].append(box)
    ranks = []
    for number, boxes in enumerate(held):
        shards, tensors = place(rng, boxes, getattr(torch, dtype))
        names = dict.fromkeys(shapes, dtype)
        layout = WeightLayout(number, f"host {number % hosts}", tuple(shards), dict(shapes), names)
        ranks.append(Rank(layout, tensors))
    return ranks


def fill(ranks: list[Rank], full: Mapping[str, Tensor]) -> None:
    for rank in ranks:
        for shard in rank.layout.shards:
            box = shard.box
            shard_view(rank.tensors, shard).copy_(view_of(full[box.tensor], box.start, box.shape))


def run(plan: Plan, sources: list[Rank], destinations: list[Rank]) -> None:
    for copy in plan.copies:
        source = view_of(sources[copy.source_rank].tensors[copy.source_local], copy.source_start, copy.shape)
        view_of(destinations[copy.rank].tensors[copy.local], copy.local_start, copy.shape).add_(source)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_any_layout_reaches_any_other(seed: int) -> None:
    rng = random.Random(seed)
    shapes = {
        f"t{i}": tuple(rng.randint(1, 7) for _ in range(rng.choice([1, 1, 2, 2, 3]))) for i in range(rng.randint(1, 5))
    }
    dtype = rng.choice(["float32", "bfloat16"])
    sources = ranks_of(rng, shapes, rng.randint(1, 6), "float32", rng.choice([1, 2]))
    destinations = ranks_of(rng, shapes, rng.randint(1, 6), dtype, rng.choice([1, 2]))
    full = {name: torch.randint(1, 200, shape).float() for name, shape in shapes.items()}
    fill(sources, full)
    before = [{name: t.clone() for name, t in rank.tensors.items()} for rank in destinations]
    plan = make_plan([r.layout for r in sources], [r.layout for r in destinations])
    run(plan, sources, destinations)  # adds to zeros: a byte written twice or never would show
    wanted = [Rank(r.layout, tensors) for r, tensors in zip(destinations, before, strict=True)]
    fill(wanted, full)
    for got, expected in zip(destinations, wanted, strict=True):
        for name, tensor in expected.tensors.items():
            assert torch.equal(got.tensors[name], tensor)
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    num_bytes = sum(num_elements(s.box) * itemsize for r in destinations for s in r.layout.shards)
    assert sum(bytes_by_link(plan).values()) == sum(copy.num_bytes for copy in plan.copies) == num_bytes
    sums = [
        merge_rank_checksums(
            [layout_checksums(r.layout, r.tensors, dict.fromkeys(shapes, dtype)) for r in side], shapes
        )
        for side in (sources, destinations)
    ]
    assert sums[0] == sums[1]


@given(st.integers(0, 10**9))
def test_subtract_and_intersect_partition_a_box(seed: int) -> None:
    rng = random.Random(seed)
    dims = rng.randint(1, 4)

    def box() -> Box:
        return Box("t", tuple(rng.randint(0, 4) for _ in range(dims)), tuple(rng.randint(1, 4) for _ in range(dims)))

    a, b = box(), box()
    seen = torch.zeros((9,) * dims)
    parts = subtract(a, b)
    common = overlap(a.start, a.shape, b.start, b.shape)
    for part in [*parts, *([Box("t", *common)] if common else [])]:
        view_of(seen, part.start, part.shape).add_(1)
    expected = torch.zeros_like(seen)
    view_of(expected, a.start, a.shape).add_(1)
    assert torch.equal(seen, expected)
    assert len(parts) <= 2 * dims


def rows(rank: int, host: str, start: int, num: int, *, full: int = 12) -> WeightLayout:
    box = Box("w", (start, 0), (num, 4))
    shards = (Shard(box, "w", (0, 0)),) if num else ()
    return WeightLayout(rank, host, shards, {"w": (full, 4)}, {"w": "float32"})


def test_the_nearest_replica_gives_and_equally_near_ones_share() -> None:
    sources = [rows(0, "a", 0, 12), rows(1, "a", 0, 12), rows(2, "b", 0, 12)]
    plan = make_plan(sources, [rows(0, "a", 0, 12), rows(1, "a", 0, 12), rows(2, "b", 0, 6)])
    assert {(c.source_rank, c.rank) for c in plan.copies} == {(0, 0), (1, 1), (2, 2)}
    far_away = [rows(rank, "c", 2 * rank, 2) for rank in (3, 4, 5)]
    spread = make_plan(sources, far_away)
    assert sorted(c.source_rank for c in spread.copies) == [0, 1, 2]


def whole_tensors(rank: int, sizes: Mapping[str, int], *held: str, dtype: str = "float32") -> WeightLayout:
    """A rank that holds some of the tensors, each of so many rows of one element."""
    shards = tuple(Shard(whole_box(name, (sizes[name], 1)), name, (0, 0)) for name in held or sizes)
    return WeightLayout(rank, "a", shards, {n: (size, 1) for n, size in sizes.items()}, dict.fromkeys(sizes, dtype))


def given_bytes(plan: Plan) -> dict[int, int]:
    return {rank: sum(c.num_bytes for c in plan.copies if c.source_rank == rank) for rank in (0, 1)}


def test_a_rank_of_the_host_is_nearer_than_the_same_rank_of_another() -> None:
    sources = [rows(0, "a", 0, 12), rows(1, "b", 0, 12)]
    for rank in (0, 5):
        assert {copy.source_rank for copy in make_plan(sources, [rows(rank, "b", 0, 12)]).copies} == {1}


def test_who_must_give_much_gives_less_of_what_others_have_too() -> None:
    sizes = {"t0": 3, "t1": 3, "t2": 4, "shared": 5}
    sources = [whole_tensors(0, sizes, "t0", "t1", "shared"), whole_tensors(1, sizes, "t2", "shared")]
    plan = make_plan(sources, [whole_tensors(7, sizes)])
    assert given_bytes(plan) == {0: 4 * (3 + 3), 1: 4 * (4 + 5)}
    sizes = {"own": 6} | {f"t{number}": 1 for number in range(10)}
    shared = [name for name in sizes if name != "own"]
    sources = [whole_tensors(0, sizes), whole_tensors(1, sizes, *shared)]
    assert given_bytes(make_plan(sources, [whole_tensors(7, sizes)])) == {0: 4 * 8, 1: 4 * 8}


def test_copies_of_the_same_elements_in_the_same_dtype_share_a_checksum() -> None:
    sizes = {"a": 1, "b": 2, "c": 3}
    wide, other, narrow = (whole_tensors(rank, sizes, dtype=dtype) for rank, dtype in ((1, "float32"), (2, "float32"),
                           (3, "bfloat16")))  # fmt: skip
    plan = make_plan([whole_tensors(0, sizes)], [wide, other, narrow])
    ids, first = plan.checksum_ids
    by_id: dict[int, set[tuple[str, str]]] = {}
    for number, copy in zip(ids.tolist(), plan.copies, strict=True):
        by_id.setdefault(number, set()).add((copy.tensor, copy.dtype))
    assert all(len(same) == 1 for same in by_id.values())
    assert (len(plan.copies), len(by_id), len(first)) == (9, 6, 6)


def test_only_what_engines_need_must_be_complete() -> None:
    sizes = {"unused": 2, "w": 2}
    source = whole_tensors(0, sizes)
    half = tuple(replace(shard, box=replace(shard.box, shape=(1, 1))) for shard in source.shards)
    with pytest.raises(WeightTransferError, match=r"no rank of the trainer holds Box\(tensor='w'"):
        make_plan([replace(source, shards=half)], [whole_tensors(1, sizes, "w")])
    whole_w = (half[0], source.shards[1])
    assert len(make_plan([replace(source, shards=whole_w)], [whole_tensors(1, sizes, "w")]).copies) == 1


def test_uneven_shards_and_ranks_without_rows() -> None:
    sources = [rows(0, "a", 0, 5), rows(1, "a", 5, 5), rows(2, "a", 10, 2), rows(3, "a", 12, 0)]
    plan = make_plan(sources, [rows(0, "a", 0, 12)])
    assert [(c.start, c.shape) for c in sorted(plan.copies, key=lambda c: c.start)] == [
        ((0, 0), (5, 4)),
        ((5, 0), (5, 4)),
        ((10, 0), (2, 4)),
    ]
    assert {copy.source_rank for copy in plan.copies} == {0, 1, 2}


@pytest.mark.parametrize("tied_at", ["trainer", "rollout", "both", "differently"])
def test_tied_tensors_are_matched(tied_at: str) -> None:
    def layout(names: list[str], aliases: dict[str, str]) -> WeightLayout:
        shards = tuple(Shard(whole_box(n, (3, 2)), n, (0, 0)) for n in names)
        return WeightLayout(0, "a", shards, dict.fromkeys(names, (3, 2)), dict.fromkeys(names, "float32"), aliases)

    tied, both = layout(["embed"], {"head": "embed"}), layout(["embed", "head"], {})
    other = layout(["head"], {"embed": "head"})
    source, destination = {
        "trainer": (tied, both),
        "rollout": (both, tied),
        "both": (tied, tied),
        "differently": (tied, other),
    }[tied_at]
    plan = make_plan([source], [destination])
    assert {copy.local for copy in plan.copies} == set(destination.full_shapes)
    assert {copy.tensor for copy in plan.copies} == {"embed"}
    assert plan.unused == (("head",) if tied_at == "rollout" else ())


def test_errors_name_the_tensor_that_does_not_fit() -> None:
    whole = rows(0, "a", 0, 12)
    with pytest.raises(WeightTransferError, match="no tensor 'x'"):
        make_plan([whole], [replace(whole, full_shapes={"w": (12, 4), "x": (1,)})])
    with pytest.raises(WeightTransferError, match=r"two shapes: \(12, 4\) .* \(13, 4\)"):
        make_plan([whole], [rows(0, "a", 0, 1, full=13)])
    with pytest.raises(WeightTransferError, match=r"no rank of the trainer holds Box\(tensor='w', start=\(5, 0\)"):
        make_plan([rows(0, "a", 0, 5)], [whole])
    with pytest.raises(ValueError, match="differ"):
        make_plan([whole, whole], [whole])
    with pytest.raises(WeightTransferError, match=r"no rollout rank holds .*start=\(5, 0\)"):
        check_complete([rows(0, "a", 0, 5), rows(1, "a", 6, 6)])
    assert missing_boxes([rows(0, "a", 0, 5), rows(1, "a", 5, 7)]) == []
    tensors = {"w": torch.zeros(3, 4)}
    with pytest.raises(WeightTransferError, match=r"which is \(3, 4\)"):
        shard_view(tensors, whole.shards[0])
    with pytest.raises(WeightTransferError, match="'w' that does not exist"):
        shard_view({}, whole.shards[0])


def test_large_plans_are_quick() -> None:
    """A mixture of experts as 16 trainer ranks hold it, for 16 rollout ranks that split it otherwise."""
    num_experts, num_layers, ranks = 64, 8, 16
    shapes = {
        f"layers.{layer}.experts.{e}.{w}": (96, 64)
        for layer in range(num_layers)
        for e in range(num_experts)
        for w in ("gate", "up", "down")
    }
    dtypes = dict.fromkeys(shapes, "bfloat16")

    def side(owner: int, dim: int) -> list[WeightLayout]:
        layouts = []
        for rank in range(ranks):
            shards = []
            for number, (name, shape) in enumerate(shapes.items()):
                if number % owner == rank % owner:
                    parts = ranks // owner
                    size = shape[dim] // parts
                    start = [0, 0]
                    start[dim] = size * (rank // owner)
                    box = list(shape)
                    box[dim] = size
                    shards.append(Shard(Box(name, tuple(start), tuple(box)), name, (0, 0)))
            layouts.append(WeightLayout(rank, "a", tuple(shards), shapes, dtypes))
        return layouts

    plan = make_plan(side(8, 0), side(4, 1))
    assert sum(copy.num_bytes for copy in plan.copies) == sum(prod(shape) * 2 for shape in shapes.values())
    assert len(plan.copies) == len(shapes) * 2 * 4
    given = {rank: sum(c.num_bytes for c in plan.copies if c.source_rank == rank) for rank in range(ranks)}
    assert max(given.values()) == min(given.values())
