"""What a Megatron rank holds of the HF tensors: fill it from a source, describe it, gather whole tensors, save it.

Checkpoints have masters and moments as boxes of HF tensors, so that every engine loads what another one saved. Each
data-parallel rank writes the elements whose optimizer state it holds, and nothing is gathered.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlsys.engines.megatron.groups import MegatronRanks
from rlsys.engines.megatron.optim import OptimizerRange
from rlsys.engines.mesh import gather_json
from rlsys.engines.optimizer import MOMENTS
from rlsys.engines.tensor_files import read_tensor_index, saved_tensors
from rlsys.models.hf import TensorSource, differing_tensors, fill_shards
from rlsys.models.lora import LoraSettings, hf_name, is_adapter
from rlsys.models.megatron.adapter_factors import EXPERTS, AdapterPlan, Factors, factors_of, plan_adapters
from rlsys.models.megatron.adapters import merged_weight
from rlsys.models.megatron.build import TokenGPT
from rlsys.models.megatron.family import Family, Head
from rlsys.models.megatron.parallel import RankPlace
from rlsys.models.megatron.rules import by_local, extents
from rlsys.models.megatron.spec import HAS_TRANSFORMER_ENGINE
from rlsys.models.vision import is_tower
from rlsys.telemetry.jsonl import JsonObject
from rlsys.types import Box, HFConfig, Shapes, Shard, WeightLayout
from rlsys.utils.boxes import overlap, relative, slices
from rlsys.utils.errors import CheckpointError
from rlsys.utils.grouping import buckets, group_by
from rlsys.utils.hosts import host_id


@dataclass(frozen=True)
class ModelShards:
    """This rank's chunks, and which boxes of which HF tensors its tensors are; with `lora` the factors of adapters are
    among these tensors, the chunks have to be given them, and nothing else is trained but a scalar head. A frozen
    image encoder is not trained either."""

    family: Family
    hf_config: HFConfig
    head: Head
    ranks: MegatronRanks
    chunks: Sequence[TokenGPT]
    lora: LoraSettings | None = None
    freeze_vision_tower: bool = False

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        return self._shards_at(self.ranks.place)

    @cached_property
    def adapters(self) -> AdapterPlan | None:
        return None if self.lora is None else plan_adapters(self.lora, self._base_at(RankPlace()), self.base_shapes)

    @cached_property
    def factors(self) -> dict[str, list[Factors]]:
        """The adapters of this rank's weights by local name."""
        return self._factors_at(self.ranks.place)

    def _factors_at(self, place: RankPlace) -> dict[str, list[Factors]]:
        if self.adapters is None:
            return {}
        return factors_of(self.adapters, self._base_at(place), self._base_at(place.without_tensor_parallelism()))

    def _shards_at(self, place: RankPlace) -> tuple[Shard, ...]:
        factors = (one for of_weight in self._factors_at(place).values() for one in of_weight)
        return (*self._base_at(place), *(shard for one in factors for shard in one.shards))

    def _base_at(self, place: RankPlace) -> tuple[Shard, ...]:
        return self.family.shards(self.hf_config, place, head=self.head, te=HAS_TRANSFORMER_ENGINE)

    @cached_property
    def base_shapes(self) -> Shapes:
        """Full shapes of the model's tensors by HF name."""
        return self.family.hf_shapes(self.hf_config, head=self.head)

    @cached_property
    def full_shapes(self) -> Shapes:
        """Those of the adapters too."""
        return {**self.base_shapes, **(self.adapters.shapes if self.adapters is not None else {})}

    def is_trained(self, name: str) -> bool:
        """Whether a tensor that is a parameter is trained, by its HF name."""
        if self.freeze_vision_tower and is_tower(name):
            return False
        return self.lora is None or is_adapter(name) or name.startswith("score.")

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by local name."""
        return {f"{number}.{n}": p for number, chunk in enumerate(self.chunks) for n, p in chunk.named_parameters()}

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers that are weights of the model, such as a router's bias."""
        wanted = {shard.local for shard in self.shards}
        all_ = {f"{number}.{n}": b for number, chunk in enumerate(self.chunks) for n, b in chunk.named_buffers()}
        return {name: buffer for name, buffer in all_.items() if name in wanted}

    def local(self) -> dict[str, Tensor]:
        """Parameters and buffers by local name, live."""
        return {name: t.detach() for name, t in {**self.parameters, **self.buffers}.items()}

    @cached_property
    def copies(self) -> frozenset[Shard]:
        """Shards whose box another rank also holds and provides: norms of tensor-parallel ranks, tied embeddings."""
        mine = self.ranks.place
        earlier = [replace(mine, tp_rank=rank) for rank in range(mine.tp_rank)]
        if mine.is_last_stage and mine.pp_rank > 0:
            earlier += [replace(mine, tp_rank=rank, pp_rank=0) for rank in range(mine.sizes.tp)]
        boxes = {s.box for place in earlier for s in self._shards_at(place) if EXPERTS not in s.local}
        others = [replace(mine, etp_rank=rank) for rank in range(mine.etp_rank)] if self.lora is not None else []
        boxes |= {s.box for place in others for s in self._shards_at(place) if EXPERTS in s.local}
        return frozenset(shard for shard in self.shards if shard.box in boxes)

    def mark_parameters(self, *, trained: bool) -> None:
        """Mark for Megatron which parameters are parts, which count in a norm on this tensor-parallel rank too, and ask
        for gradients of what is trained, if anything is."""
        parts = {shard.local for shard in self.shards if shard not in self.copies}
        wanted = {shard.local for shard in self.shards if self.is_trained(shard.box.tensor)}
        for name, parameter in self.parameters.items():
            parameter.tensor_model_parallel = name in parts  # type: ignore[attr-defined]
            parameter.requires_grad_(trained and name in wanted)

    def gives(self, shard: Shard) -> bool:
        """Whether this is the one rank of all that provides this box."""
        replica = self.ranks.expert_dp_rank if EXPERTS in shard.local else self.ranks.copy_rank
        return replica == 0 and shard not in self.copies

    @cached_property
    def _all_ranks(self) -> list[dict[str, Any]]:
        """What each rank holds; collective."""
        local = self.local()
        dtypes = {s.box.tensor: str(local[s.local].dtype).removeprefix("torch.") for s in self.shards}
        buffers = sorted({s.box.tensor for s in self.shards if s.local in self.buffers})
        return gather_json({"dtypes": dtypes, "buffers": buffers})

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Type of each HF tensor, those of other ranks included."""
        dtypes = {name: dtype for part in self._all_ranks for name, dtype in part["dtypes"].items()}
        return {name: dtypes[name] for name in self.full_shapes}

    @cached_property
    def untrained(self) -> frozenset[str]:
        """HF tensors that are buffers on any rank, or frozen."""
        buffers = (name for part in self._all_ranks for name in part["buffers"])
        return frozenset([*buffers, *(name for name in self.full_shapes if not self.is_trained(name))])

    @cached_property
    def base_held(self) -> tuple[Shard, ...]:
        """The shards of the model itself."""
        return tuple(shard for shard in self.shards if shard.box.tensor in self.base_shapes)

    def layout(self) -> WeightLayout:
        """The boxes of HF tensors on this rank."""
        dtypes = {name: self.dtypes[name] for name in self.base_shapes}
        aliases = self.family.aliases(self.hf_config) if self.head == "lm" else {}
        return WeightLayout(self.ranks.rank, host_id(), self.base_held, self.base_shapes, dtypes, aliases)

    def fill(self, source: TensorSource) -> None:
        """Copy this rank's boxes from `source`; what no box covers (vocabulary padding) becomes zero."""
        load_shards(source, self.shards, self.local())

    def merged(self) -> Callable[[str], Tensor]:
        """Reads local tensors by name, with the products of their adapters; only the last one that was read is kept."""
        local = self.local()

        @lru_cache(maxsize=1)
        def read(name: str) -> Tensor:
            return merged_weight(self.chunks, name) if name in self.factors else local[name]

        return read

    def full(
        self, read: Callable[[str], Tensor], bucket_bytes: int, *, names: Collection[str]
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Whole HF tensors made of what each rank can `read` of local ones, bucket by bucket; the same on every rank.

        Collective. What no rank holds is zero.
        """
        own = [shard for shard in self.shards if shard.box.tensor in names and self.gives(shard)]
        given = group_by(own, lambda shard: shard.box.tensor)
        dtypes = {name: getattr(torch, self.dtypes[name]) for name in names}
        num_bytes = {name: math.prod(self.full_shapes[name]) * dtypes[name].itemsize for name in names}
        for bucket in buckets(num_bytes, bucket_bytes):
            yield [(name, self._whole(name, dtypes[name], read, given.get(name, ()))) for name in bucket]

    def _whole(self, name: str, dtype: torch.dtype, read: Callable[[str], Tensor], given: Sequence[Shard]) -> Tensor:
        """Every byte comes from one rank and is zero on the others, so that a sum of bytes is exact."""
        whole = torch.zeros(self.full_shapes[name], dtype=dtype, device=self.ranks.device)
        for shard in given:
            whole[slices(shard.box.start, shard.box.shape)] = region(read(shard.local), shard).to(whole)
        if self.ranks.world_size > 1:
            dist.all_reduce(whole.view(-1).view(torch.uint8))
        return whole


def region(tensor: Tensor, shard: Shard) -> Tensor:
    """The part of a local tensor that belongs to a shard, as a view."""
    return tensor[slices(shard.local_start, shard.box.shape)]


@dataclass(frozen=True)
class MegatronState:
    """A Contents of rlsys.engines.checkpoint; `parts` among "model", "optimizer" and "extra"."""

    held: ModelShards
    ranges: tuple[OptimizerRange, ...]
    parts: frozenset[str]

    @property
    def layout(self) -> tuple[str, JsonObject]:
        return "megatron_config.json", {"world_size": dist.get_world_size(), **asdict(self.held.ranks.place.sizes)}

    def _kinds(self) -> dict[str, str]:
        """Prefix of the keys in the checkpoint, by the tensor of a range that they hold."""
        kinds = {"master": "model."} if "model" in self.parts else {}
        if "optimizer" in self.parts and self.ranges:
            kinds |= {moment: f"optim.{moment}." for moment in MOMENTS}
        return kinds

    def shapes(self) -> dict[str, Sequence[int]]:
        trained = {name: shape for name, shape in self.held.full_shapes.items() if name not in self.held.untrained}
        return {
            prefix + self._saved_name(name): shape
            for kind, prefix in self._kinds().items()
            for name, shape in (self.held.full_shapes if kind == "master" else trained).items()
        }

    def _saved_name(self, name: str) -> str:
        """A tensor's name in checkpoints, where peft's wrapping of an adapted layer shows, as in FSDPEngine's."""
        layer, _, kind = name.rpartition(".")
        is_adapted = self.held.adapters is not None and f"{layer}.weight" in self.held.adapters.adapted
        return f"{layer}.base_layer.{kind}" if is_adapted else name

    def boxes(self) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        """(key, offset, values) of everything this rank writes; no element is written twice."""
        kinds = self._kinds()
        for box, tensors in self._boxes(given_only=True):
            for kind, prefix in kinds.items():
                yield prefix + self._saved_name(box.tensor), box.start, tensors[kind]
        if "model" in self.parts:
            local = self.held.local()
            for shard in self.held.shards:
                has_master = bool(self.ranges) and shard.box.tensor not in self.held.untrained
                if not has_master and self.held.gives(shard):
                    name = f"model.{self._saved_name(shard.box.tensor)}"
                    yield name, shard.box.start, region(local[shard.local], shard)

    def _boxes(self, *, given_only: bool) -> Iterator[tuple[Box, dict[str, Tensor]]]:
        """Boxes of HF tensors of which this rank holds masters and moments, and views of these."""
        left_out = self.held.copies if given_only else ()
        shards = by_local(shard for shard in self.held.shards if shard not in left_out)
        for part in self.ranges:
            for start, size, at in flat_boxes(part.start, part.stop, self.held.parameters[part.local].shape):
                for shard in shards.get(part.local, ()):
                    if (cut := overlap(start, size, shard.local_start, shard.box.shape)) is None:
                        continue
                    first, extent = cut
                    inside = slices(relative(first, start), extent)
                    count = torch.Size(size).numel()
                    views = {name: t[at : at + count].view(size)[inside] for name, t in part.tensors.items()}
                    moved = zip(shard.box.start, first, shard.local_start, strict=True)
                    yield Box(shard.box.tensor, tuple(b + f - s for b, f, s in moved), extent), views

    @torch.no_grad()
    def fill(self, kind: str, source: TensorSource) -> None:
        """Copy "master", "exp_avg" or "exp_avg_sq" from `source`, which may be more precise than the parameters."""
        for box, tensors in self._boxes(given_only=False):
            tensors[kind].copy_(source[box.tensor].read(box.start, box.shape))

    def read(self, path: Path) -> None:
        index = read_tensor_index(path)
        if "model" in self.parts:
            self.held.fill(saved_tensors(path, index, "model.", rename=hf_name))
        for kind, prefix in self._kinds().items():
            self.fill(kind, saved_tensors(path, index, prefix, rename=hf_name))


def flat_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(start, shape, offset from `start`) of the boxes that make up elements `start` to `stop` of a flattened tensor: a
    part of a row, whole rows, a part of a row."""
    if len(shape) == 1:
        yield (start,), (stop - start,), 0
        return
    width, at = math.prod(shape[1:]), start
    while at < stop:
        row, column = divmod(at, width)
        if column == 0 and (whole := (stop - at) // width):
            yield (row, *(0,) * (len(shape) - 1)), (whole, *shape[1:]), at - start
            at += whole * width
            continue
        end = min(stop - at, width - column)
        for first, size, offset in flat_boxes(column, column + end, shape[1:]):
            yield (row, *first), (1, *size), at - start + offset
        at += end


def load_shards(source: TensorSource, shards: Sequence[Shard], local_tensors: Mapping[str, Tensor]) -> None:
    """Fill a rank's tensors, in place and in their own dtype, with the boxes of its shards.

    Only the rank's boxes are read. Elements no shard covers, padding of the vocabulary, become zero. CheckpointError,
    before anything is changed, unless the local tensors are exactly those of the shards.
    """
    needed = extents(shards)
    there = {
        name: needed[name] if name in needed and _fits(needed[name], tensor.shape) else tuple(tensor.shape)
        for name, tensor in local_tensors.items()
    }
    if differences := differing_tensors(needed, there, whose="the table's"):
        raise CheckpointError(f"Megatron's model is not that of the family's table: {differences}")
    with torch.no_grad():
        for name, own in by_local(shards).items():
            fill_shards(local_tensors[name].detach(), own, source)


def _fits(extent: Sequence[int], shape: Sequence[int]) -> bool:
    """Padding is only at the end of the first dimension, and less than a row a part: other sizes are equal."""
    return len(extent) == len(shape) and extent[0] <= shape[0] and tuple(extent[1:]) == tuple(shape[1:])
