"""Trainers of every family and layout to engines of every layout: exactly once, no byte too many, bitwise."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest

from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.types import WeightLayout
from rlsys.utils.errors import ConfigError
from rlsys.weights.plan import Plan, make_plan
from scripts.weight_layouts import (
    EngineSizes,
    bytes_by_link,
    engine_layouts,
    fsdp_layouts,
    local_shapes,
    megatron_layouts,
)
from tests.unit.models.megatron_families import tiny

MAX_RANKS = 16
SIZES = (1, 2, 4, 8, 16)
SMALL = {"num_hidden_layers": 2, "vocab_size": 53, "num_local_experts": 4, "n_routed_experts": 4, "num_experts": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {**config, **{key: value for key, value in SMALL.items() if key in config}}
    for name, config in tiny.CONFIGS.items()
    if name not in ("llama-linear-rope", "mistral", "qwen3-moe-unnormalised")
}
SHARE = {"llama": 0.04, "qwen2-tied": 0.04, "qwen3": 0.04}


@dataclass
class Side:
    """Layouts and, for each rank, local tensors that hold what a model of element numbers gives them."""

    layouts: list[WeightLayout]
    tensors: list[dict[str, np.ndarray]] = field(default_factory=list)


@cache
def model(family: str) -> dict[str, np.ndarray]:
    """Every element of every HF tensor has a number of its own."""
    full, at = {}, 1
    for name, shape in family_of(CONFIGS[family]).hf_shapes(CONFIGS[family]).items():
        full[name] = np.arange(at, at + prod(shape), dtype=np.int32).reshape(shape)
        at += prod(shape)
    return full


def part(array: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    extra = len(start) - len(shape)
    return array[(*start[:extra], *(slice(a, a + n) for a, n in zip(start[extra:], shape, strict=True)))]


def filled(layouts: list[WeightLayout], full: Mapping[str, np.ndarray]) -> Side:
    side = Side(layouts)
    made: dict[int, dict[str, np.ndarray]] = {}
    for layout in layouts:
        if id(layout.shards) not in made:
            tensors = {name: np.zeros(shape, np.int32) for name, shape in local_shapes(layout).items()}
            for shard in layout.shards:
                box = shard.box
                part(tensors[shard.local], shard.local_start, box.shape)[...] = part(
                    full[box.tensor], box.start, box.shape
                )
            made[id(layout.shards)] = tensors
        side.tensors.append(made[id(layout.shards)])
    return side


def trainers(family: str) -> Iterator[list[WeightLayout]]:
    config = CONFIGS[family]
    shapes, aliases = family_of(config).hf_shapes(config), family_of(config).aliases(config)
    for ranks in (1, 3, 7, 16):
        yield fsdp_layouts(shapes, ranks, aliases=aliases)
    experts = any(".experts." in name for name in shapes)
    for tp in SIZES:
        for pp in (1, 2):
            for dp in SIZES:
                for ep in SIZES if experts else (1,):
                    for etp in (1, 2) if ep > 1 else (1,):
                        sizes = ParallelSizes(tp=tp, pp=pp, ep=ep, etp=etp)
                        if tp * pp * dp <= MAX_RANKS and tp * dp % (ep * etp) == 0:
                            try:
                                yield megatron_layouts(config, sizes, dp_size=dp, te=(dp + tp) % 2 == 0)
                            except ConfigError:
                                continue


def engines(family: str) -> Iterator[list[WeightLayout]]:
    config = CONFIGS[family]
    of = family_of(config)
    shapes, tied = of.hf_shapes(config), bool(of.aliases(config))
    kv_heads = config.get("num_key_value_heads", config["num_attention_heads"])
    experts = any(".experts." in name for name in shapes)
    for tp in SIZES:
        for pp in (1, 2):
            for dp in SIZES:
                for ep in SIZES if experts else (1,):
                    if tp * pp * dp <= MAX_RANKS:
                        try:
                            sizes = EngineSizes(tp_size=tp, pp_size=pp, dp_size=dp, ep_size=ep, vocab_multiple=8)
                            yield engine_layouts(shapes, sizes, num_kv_heads=kv_heads, tied=tied, dtype="float32")
                        except ConfigError:
                            continue


def held_alone(source: WeightLayout, destination: WeightLayout, names: Mapping[str, np.ndarray]) -> int:
    """Elements of the destination's boxes that this source rank holds, by marking them in the whole tensors."""
    held: dict[str, np.ndarray] = {}
    for shard in source.shards:
        mark = held.setdefault(shard.box.tensor, np.zeros(names[shard.box.tensor].shape, bool))
        part(mark, shard.box.start, shard.box.shape)[...] = True
    return sum(
        int(part(held[s.box.tensor], s.box.start, s.box.shape).sum())
        for s in destination.shards
        if s.box.tensor in held
    )


def run(plan: Plan, source: Side, destinations: list[WeightLayout]) -> list[dict[str, np.ndarray]]:
    """Adds to zeros: an element written twice or never shows."""
    shapes = {id(layout.shards): local_shapes(layout) for layout in destinations}
    got = [{n: np.zeros(s, np.int32) for n, s in shapes[id(layout.shards)].items()} for layout in destinations]
    for copy in plan.copies:
        target = part(got[copy.rank][copy.local], copy.local_start, copy.shape)
        target += part(source.tensors[copy.source_rank][copy.source_local], copy.source_start, copy.shape)
    return got


def check(source: Side, wanted: Side, full: Mapping[str, np.ndarray]) -> None:
    plan = make_plan(source.layouts, wanted.layouts)
    got = run(plan, source, wanted.layouts)
    for ours, theirs in zip(got, wanted.tensors, strict=True):
        for name, tensor in theirs.items():
            assert np.array_equal(ours[name], tensor), name
    links = bytes_by_link(plan)
    for layout in wanted.layouts:
        elements = sum(prod(shard.box.shape) for shard in layout.shards)
        here = [n for (_, rank), n in links.items() if rank == layout.rank]
        assert sum(here) == 4 * elements
        if layout.rank < len(source.layouts) and layout.rank in (0, len(wanted.layouts) - 1):
            beside = source.layouts[layout.rank]
            own = held_alone(beside, layout, full) if beside.host == layout.host else 0
            assert links.get((layout.rank, layout.rank), 0) == 4 * own


def pairs(family: str, share: float) -> int:
    """Check a share of all pairs of a family's layouts, drawn by a fixed seed; returns how many."""
    rng, full = random.Random(family), model(family)
    sources = [filled(layouts, full) for layouts in trainers(family)]
    wanted = [filled(layouts, full) for layouts in engines(family)]
    chosen = [(a, b) for a in sources for b in wanted if rng.random() < share]
    for a, b in chosen:
        check(a, b, full)
    return len(chosen)


def test_two_hundred_pairs_of_layouts() -> None:
    assert sum(pairs(family, SHARE.get(family, 0.006)) for family in CONFIGS) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_all_pairs_of_layouts(family: str) -> None:
    assert pairs(family, 1.0) > 100
