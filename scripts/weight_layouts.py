"""What trainer and engine ranks hold, in boxes of HF tensors, computed without any rank: for plans, tests, benchmarks.

The engine is of vLLM's or SGLang's shape: fused qkv_proj and gate_up_proj, stacked experts w13_weight (E, 2I, H) and
w2_weight (E, H, I), fused MLA down projections, vocabulary padded to a multiple, key-value heads repeated where there
are fewer than tensor-parallel ranks. A live engine is learned from itself instead (`rlsys.weights.learn`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import ConfigError
from rlsys.weights.layout import element_bytes
from rlsys.weights.plan import Plan

Shape = tuple[int, ...]
LAYER = re.compile(r"^(model\.layers\.)(\d+)\.(.*)$")
EXPERT = re.compile(r"^(.*\.experts|.*block_sparse_moe\.experts)\.(\d+)\.(\w+)\.weight$")
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}
ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj", "kv_a_proj_with_mqa")
ROWS = ("q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")
W13, W2 = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1}, ("down_proj", "w2")


def bytes_by_link(plan: Plan) -> dict[tuple[int, int], int]:
    """Bytes that a transfer moves from each source rank to each destination rank."""
    sizes = np.array([element_bytes(name) for name in plan.dtypes], dtype=np.int64)
    part, _, shard, giver, taker = plan.moves.T
    links, of_copy = np.unique(giver << 32 | taker, return_inverse=True)
    totals = np.zeros(len(links), np.int64)
    np.add.at(totals, of_copy.reshape(-1), plan.shape.prod(1)[part] * sizes[plan.shards.dtype[shard]])
    return {(int(k) >> 32, int(k) & 0xFFFFFFFF): int(n) for k, n in zip(links, totals, strict=True)}


def megatron_layouts(
    hf_config: Mapping[str, Any],
    sizes: ParallelSizes,
    *,
    dp_size: int = 1,
    dtype: str = "bfloat16",
    ranks_per_host: int = 8,
    te: bool = False,
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
        place = _place(sizes, rank, world_size)
        if place not in made:
            made[place] = family.shards(hf_config, place, te=te)
        layouts.append(WeightLayout(rank, f"host {rank // ranks_per_host}", made[place], shapes, dtypes, aliases))
    return layouts


def _place(sizes: ParallelSizes, rank: int, world_size: int) -> RankPlace:
    """Where Megatron puts a rank: tensor-parallel ranks are neighbours, then data-parallel ones, then stages."""
    stage = world_size // sizes.pp
    if stage % (sizes.ep * sizes.expert_tp):
        raise ConfigError(f"ep {sizes.ep} x etp {sizes.expert_tp} does not divide a stage of {stage} ranks")
    inner = rank % stage
    experts = {"ep_rank": inner // sizes.expert_tp % sizes.ep, "etp_rank": inner % sizes.expert_tp}
    return RankPlace(sizes, tp_rank=inner % sizes.tp, pp_rank=rank // stage, **experts)


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


@dataclass(frozen=True)
class EngineSizes:
    """How an engine is cut. Experts go over `ep_size` ranks of tp and dp; where ep_size < tp_size, the rest of the
    tensor-parallel group cuts each expert. `vocab_multiple` is what the vocabulary is padded to before it is cut.
    """

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    dp_size: int = 1
    vocab_multiple: int = 64

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    def check(self) -> None:
        whole = self.tp_size % self.ep_size == 0 or (
            self.ep_size % self.tp_size == 0 and self.dp_size % (self.ep_size // self.tp_size) == 0
        )
        if not whole:
            raise ConfigError(f"ep_size={self.ep_size} must divide tp_size={self.tp_size} or fill groups of tp x dp")


@dataclass(frozen=True)
class _Rank:
    sizes: EngineSizes
    tp: int
    pp: int
    dp: int

    @property
    def expert_cut(self) -> tuple[int, int, int]:
        """Expert-parallel rank, part of each expert, number of parts."""
        s = self.sizes
        if s.ep_size <= s.tp_size:
            parts = s.tp_size // s.ep_size
            return self.tp // parts, self.tp % parts, parts
        return self.dp % (s.ep_size // s.tp_size) * s.tp_size + self.tp, 0, 1


def engine_layouts(
    hf_shapes: Mapping[str, Shape],
    sizes: EngineSizes,
    *,
    num_kv_heads: int,
    dtype: str = "bfloat16",
    tied: bool = False,
    hosts: Mapping[int, str] | None = None,
    ranks_per_host: int = 8,
) -> list[WeightLayout]:
    """The layouts of all ranks, rank = (dp * pp_size + pp) * tp_size + tp; equal ranks share their shards.

    `hf_shapes` are all HF tensors; with `tied`, lm_head.weight is the embedding. ConfigError for indivisible sizes.
    """
    sizes.check()
    wanted = {name: tuple(s) for name, s in hf_shapes.items() if not (tied and name == "lm_head.weight")}
    last = max((int(m[2]) for m in map(LAYER.match, wanted) if m), default=0)
    layers_per_stage = -(-(last + 1) // sizes.pp_size)
    stages: dict[int, tuple[dict[str, Shape], dict[str, str], _Names]] = {}
    made: dict[tuple[int, ...], tuple[Shard, ...]] = {}
    layouts = []
    for rank in range(sizes.world_size):
        tp, pp, dp = rank % sizes.tp_size, rank // sizes.tp_size % sizes.pp_size, rank // sizes.tp_size // sizes.pp_size
        place = _Rank(sizes, tp, pp, dp)
        if pp not in stages:
            held = {n: s for n, s in wanted.items() if _on_stage(n, pp, sizes.pp_size, layers_per_stage, tied)}
            stages[pp] = held, dict.fromkeys(held, dtype), _names(held)
        shapes, dtypes, names = stages[pp]
        key = (tp, pp, *place.expert_cut)
        if key not in made:
            made[key] = tuple(_shards(shapes, names, place, num_kv_heads))
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied and pp in (0, sizes.pp_size - 1) else {}
        host = (hosts or {}).get(rank, f"host {rank // ranks_per_host}")
        layouts.append(WeightLayout(rank, host, made[key], shapes, dtypes, aliases))
    return layouts


def local_shapes(layout: WeightLayout) -> dict[str, Shape]:
    """The smallest shapes of local tensors in which a layout has room."""
    ends: dict[str, list[int]] = {}
    for shard in layout.shards:
        extra = len(shard.local_start) - len(shard.box.shape)
        sizes = (1,) * extra + shard.box.shape
        stop = [at + n for at, n in zip(shard.local_start, sizes, strict=True)]
        ends[shard.local] = [max(a, b) for a, b in zip(ends.get(shard.local, stop), stop, strict=True)]
    return {name: tuple(end) for name, end in ends.items()}


def _on_stage(name: str, pp: int, pp_size: int, layers_per_stage: int, tied: bool) -> bool:
    if match := LAYER.match(name):
        return int(match[2]) // layers_per_stage == pp
    if name.startswith("model.embed_tokens"):
        return pp == 0 or (tied and pp == pp_size - 1)
    return pp == pp_size - 1


@dataclass(frozen=True)
class _Names:
    """The tensors of a stage: experts' as (name, stack, number, module) by expert, and all others."""

    experts: dict[int, list[tuple[str, str, int, str]]]
    others: list[str]


def _names(shapes: Mapping[str, Shape]) -> _Names:
    experts: dict[int, list[tuple[str, str, int, str]]] = {}
    others = []
    for name in shapes:
        if match := EXPERT.match(name):
            experts.setdefault(int(match[2]), []).append((name, match[1], int(match[2]), match[3]))
        else:
            others.append(name)
    return _Names(experts, others)


def _shards(shapes: Mapping[str, Shape], names: _Names, rank: _Rank, num_kv_heads: int) -> Iterator[Shard]:
    fused: dict[str, dict[str, Box]] = {}
    for name in names.others:
        *path, module, kind = name.split(".")
        box = _cut(name, shapes[name], module, rank, num_kv_heads)
        if module in FUSED and not (module == "q_proj" and ".".join([*path, "kv_b_proj", "weight"]) in shapes):
            fused.setdefault(".".join([*path, FUSED[module], kind]), {})[module] = box
        elif all(box.shape):
            yield Shard(box, name, (0,) * len(box.shape))
    for local, parts in fused.items():
        at = 0
        for box in (parts[module] for module in ORDER if module in parts):
            yield Shard(box, local, (at, *(0,) * (len(box.shape) - 1)))
            at += box.shape[0]
    if names.experts:
        ep, part, parts_of_expert = rank.expert_cut
        per_rank = _whole("the experts", max(names.experts) + 1, rank.sizes.ep_size)
        for number in range(ep * per_rank, (ep + 1) * per_rank):
            for name, stack, _, module in names.experts[number]:
                yield _expert(name, shapes[name], stack, module, number % per_rank, part, parts_of_expert)


def _cut(name: str, shape: Shape, module: str, rank: _Rank, num_kv_heads: int) -> Box:
    """The box of a tensor outside the experts that a rank holds."""
    tp, size = rank.tp, rank.sizes.tp_size
    if module in ("k_proj", "v_proj") and num_kv_heads < size:
        return _part(name, shape, 0, tp // _whole(name, size, num_kv_heads), num_kv_heads)
    if module in ("embed_tokens", "lm_head"):
        multiple = rank.sizes.vocab_multiple
        chunk = _whole(name, -(-shape[0] // multiple) * multiple, size)
        start, stop = min(shape[0], tp * chunk), min(shape[0], (tp + 1) * chunk)
        return Box(name, (start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
    if module in ROWS or (FUSED.get(module) in ("qkv_proj", "gate_up_proj")):
        return _part(name, shape, 0, tp, size)
    if module in COLUMNS and len(shape) > 1:
        return _part(name, shape, 1, tp, size)
    return Box(name, (0,) * len(shape), shape)


def _expert(name: str, shape: Shape, stack: str, module: str, slot: int, part: int, parts: int) -> Shard:
    """The part of an expert's matrix that a rank holds in slot `slot` of its stacks."""
    if module in W13:
        box = _part(name, shape, 0, part, parts)
        return Shard(box, f"{stack}.w13_weight", (slot, W13[module] * box.shape[0], 0))
    if module in W2:
        return Shard(_part(name, shape, 1, part, parts), f"{stack}.w2_weight", (slot, 0, 0))
    raise ConfigError(f"'{name}': unknown matrix of an expert; use gate_proj, up_proj, down_proj, w1, w2 or w3")


def _part(name: str, shape: Shape, dim: int, number: int, parts: int) -> Box:
    size = _whole(name, shape[dim], parts)
    start = tuple(number * size if d == dim else 0 for d in range(len(shape)))
    return Box(name, start, tuple(size if d == dim else n for d, n in enumerate(shape)))


def _whole(name: str, size: int, parts: int) -> int:
    if size % parts:
        raise ConfigError(f"'{name}': {size} cannot be cut into {parts} equal parts")
    return size // parts
