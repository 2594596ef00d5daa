"""Which adapters a Megatron rank holds: arithmetic on the boxes of its weights; nothing here imports Megatron.

A local weight may be made of several Hugging Face ones (queries, keys and values; gate and up projection), each with an
A and a B of its own, and may be a part of them. Of a weight cut by rows each rank holds all of A and its rows of B; of
one cut by columns its columns of A and all of B.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlsys.models.lora import AdaptedWeight, LoraSettings, adapter_of, targeted
from rlsys.models.megatron.rules import by_local, extents
from rlsys.types import Box, Shapes, Shard

EXPERTS = ".mlp.experts."
LINEAR = (".linear_", ".in_proj.", ".out_proj.")
"""What names of Megatron's linear layers have in them, those of gated delta layers included."""


@dataclass(frozen=True)
class AdapterPlan:
    """The adapted weights by HF name and the full shapes of their factors, the same on every rank."""

    settings: LoraSettings
    adapted: Mapping[str, AdaptedWeight]
    shapes: Shapes


def plan_adapters(settings: LoraSettings, model: Sequence[Shard], shapes: Shapes) -> AdapterPlan:
    """Which of the model's linear layers get adapters; `model` is what one rank would hold that holds all of it.

    Experts are linear layers too, routers and the output layer are not. ConfigError if no layer is targeted.
    """
    matrices = [shard for shard in model if len(shard.box.shape) == 2]
    linear = {shard.box.tensor for shard in matrices if any(name in shard.local for name in LINEAR)}
    layers = targeted([name.removesuffix(".weight") for name in shapes if name in linear], settings)
    adapted = {f"{layer}.weight": adapter_of(layer, settings.alpha / settings.rank) for layer in layers}
    factors = {}
    for name, adapter in adapted.items():
        rows, columns = shapes[name]
        factors |= {adapter.a: (settings.rank, columns), adapter.b: (rows, settings.rank)}
    return AdapterPlan(settings, adapted, factors)


@dataclass(frozen=True)
class Factors:
    """A and B of one HF weight as far as one rank holds them, and which rows of the local weight B's rows make.

    `partial`: whose gradient here is a part of a sum over the ranks that share the weight.
    """

    a: Shard
    b: tuple[Shard, ...]
    rows: tuple[int, ...]
    partial: Literal["A", "B", ""]
    scale: float

    @property
    def shards(self) -> tuple[Shard, ...]:
        return (self.a, *self.b)


def factors_of(plan: AdapterPlan, held: Sequence[Shard], whole: Sequence[Shard]) -> dict[str, list[Factors]]:
    """The adapters of each local weight of a rank that holds `held`; `whole` is what it would hold uncut."""
    here, sizes, uncut = by_local(held), extents(held), extents(whole)
    factors: dict[str, list[Factors]] = defaultdict(list)
    for local, name in dict.fromkeys((s.local, s.box.tensor) for s in whole if s.box.tensor in plan.adapted):
        if len(uncut[local]) == 2:
            rows_cut, columns_cut = (n < full for n, full in zip(sizes[local], uncut[local], strict=True))
            factors[local].append(_factors(plan, name, here[local], "A" if rows_cut else "B" if columns_cut else ""))
    return dict(factors)


def _factors(plan: AdapterPlan, name: str, local: Sequence[Shard], partial: Literal["A", "B", ""]) -> Factors:
    adapter, rank = plan.adapted[name], plan.settings.rank
    module, _, attribute = local[0].local.rpartition(".")
    place = f"{module}.lora.{attribute}_{name.split('.')[-2]}"
    left, columns = local[0].box.start[1], local[0].box.shape[1]
    boxes: list[tuple[int, int, int]] = []
    rows: list[int] = []
    for shard in (shard for shard in local if shard.box.tensor == name):
        first, count = shard.box.start[0], shard.box.shape[0]
        if boxes and boxes[-1][0] + boxes[-1][1] == first:
            boxes[-1] = (boxes[-1][0], boxes[-1][1] + count, boxes[-1][2])
        else:
            boxes.append((first, count, len(rows)))
        rows.extend(range(shard.local_start[0], shard.local_start[0] + count))
    return Factors(
        Shard(Box(adapter.a, (0, left), (rank, columns)), f"{place}_A", (0, 0)),
        tuple(Shard(Box(adapter.b, (first, 0), (n, rank)), f"{place}_B", (at, 0)) for first, n, at in boxes),
        tuple(rows),
        partial,
        adapter.scale,
    )
