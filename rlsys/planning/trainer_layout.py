"""What trainer ranks hold, computed without any rank: for plans made ahead, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.types import Box, Shard, WeightLayout


def megatron_layouts(
    hf_config: Mapping[str, Any],
    sizes: ParallelSizes,
    *,
    dp_size: int = 1,
    dtype: str = "bfloat16",
    ranks_per_host: int = 8,
    grouped_experts: bool = False,
    fused_norms: bool = False,
) -> list[WeightLayout]:
    """The layouts of all ranks of a Megatron trainer of the model of `hf_config`; equal ranks share their shards.

    `dp_size` counts copies of the dense part, context-parallel ranks included.
    """
    family = family_of(hf_config)
    shapes, aliases = family.hf_shapes(hf_config), family.aliases(hf_config)
    dtypes = dict.fromkeys(shapes, dtype)
    made: dict[RankPlace, tuple[Shard, ...]] = {}
    layouts = []
    world_size = sizes.tp * sizes.pp * dp_size
    for rank in range(world_size):
        place = sizes.place(rank, world_size)
        if place not in made:
            made[place] = family.shards(hf_config, place, grouped_experts=grouped_experts, fused_norms=fused_norms)
        layouts.append(WeightLayout(rank, f"host {rank // ranks_per_host}", made[place], shapes, dtypes, aliases))
    return layouts


def fsdp_layouts(
    shapes: Mapping[str, tuple[int, ...]],
    world_size: int,
    *,
    dtype: str = "float32",
    ranks_per_host: int = 8,
    aliases: Mapping[str, str] | None = None,
) -> list[WeightLayout]:
    """The layouts of FSDP ranks: equal chunks of the first dimension, the last ones short or empty."""
    dtypes = dict.fromkeys(shapes, dtype)
    layouts = []
    for rank in range(world_size):
        shards = []
        for name, shape in shapes.items():
            chunk = -(-shape[0] // world_size)
            start, stop = min(shape[0], rank * chunk), min(shape[0], (rank + 1) * chunk)
            if start < stop:
                box = Box(name, (start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
                shards.append(Shard(box, name, (0,) * len(shape)))
        host = f"host {rank // ranks_per_host}"
        layouts.append(WeightLayout(rank, host, tuple(shards), shapes, dtypes, aliases or {}))
    return layouts
