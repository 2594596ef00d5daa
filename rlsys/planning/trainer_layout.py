"""What trainer ranks hold, computed without any rank: for plans made ahead, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsys.models.megatron.family import Place, family_of
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import ConfigError


@dataclass(frozen=True)
class MegatronSizes:
    """Parallel sizes of a Megatron trainer; `dp_size` counts replicas of the dense part, context parallel ranks too.

    `first_layers` and `last_layers` are those of the first and last pipeline stage where the split is uneven.
    """

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1
    vp_size: int = 1
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    def place(self, rank: int) -> Place:
        """Where Megatron's own order of ranks (tensor, data, pipeline from the inside) puts a rank."""
        stage = self.tp_size * self.dp_size
        if stage % (self.ep_size * self.etp_size):
            raise ConfigError(f"ep {self.ep_size} x etp {self.etp_size} does not divide a stage of {stage} ranks")
        inner = rank % stage
        return Place(
            tp_rank=inner % self.tp_size,
            tp_size=self.tp_size,
            pp_rank=rank // stage,
            pp_size=self.pp_size,
            vp_size=self.vp_size,
            ep_rank=inner // self.etp_size % self.ep_size,
            ep_size=self.ep_size,
            etp_rank=inner % self.etp_size,
            etp_size=self.etp_size,
            first_layers=self.first_layers,
            last_layers=self.last_layers,
        )


def megatron_layouts(
    hf_config: Mapping[str, Any],
    sizes: MegatronSizes,
    *,
    dtype: str = "bfloat16",
    ranks_per_host: int = 8,
    grouped_experts: bool = False,
    fused_norms: bool = False,
) -> list[WeightLayout]:
    """The layouts of all ranks of a Megatron trainer of the model of `hf_config`; equal ranks share their shards."""
    family = family_of(hf_config)
    shapes, aliases = family.hf_shapes(hf_config), family.aliases(hf_config)
    dtypes = dict.fromkeys(shapes, dtype)
    made: dict[Place, tuple[Shard, ...]] = {}
    layouts = []
    for rank in range(sizes.world_size):
        place = sizes.place(rank)
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
