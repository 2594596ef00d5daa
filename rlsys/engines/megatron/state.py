"""Checkpoints of a MegatronEngine: masters and moments as boxes of HF tensors, loadable into any layout.

The files are those of rlsys.engines.checkpoint and tensor_files, so that every engine loads what another one saved.
Each data-parallel rank writes the elements whose optimizer state it holds, and nothing is gathered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.engines.megatron.optim import OptimizerRange
from rlsys.engines.megatron.weights import ModelShards, region
from rlsys.engines.optimizer import MOMENTS
from rlsys.engines.tensor_files import read_tensor_index, saved_tensors
from rlsys.models.hf import TensorSource
from rlsys.models.lora import hf_name
from rlsys.models.megatron.rules import by_local
from rlsys.telemetry.jsonl import JsonObject
from rlsys.types import Box
from rlsys.utils.boxes import overlap, relative, slices


@dataclass(frozen=True)
class MegatronState:
    """A Contents of rlsys.engines.checkpoint; `parts` among "model", "optimizer" and "extra"."""

    held: ModelShards
    ranges: tuple[OptimizerRange, ...]
    parts: frozenset[str]

    @property
    def layout(self) -> tuple[str, JsonObject]:
        return "megatron_config.json", {"world_size": dist.get_world_size(), **asdict(self.held.ranks.sizes)}

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
        return name if self.held.adapters is None else self.held.adapters.saved_name(name)

    def boxes(self) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        """(key, offset, values) of everything this rank writes; no element is written twice."""
        kinds = self._kinds()
        for box, tensors in self._boxes(given_only=True):
            for kind, prefix in kinds.items():
                yield prefix + self._saved_name(box.tensor), box.start, tensors[kind]
        if "model" in self.parts:
            local = self.held.untrained_here() if self.ranges else self.held.local()
            for shard in self.held.shards:
                if shard.local in local and self.held.gives(shard):
                    name = f"model.{self._saved_name(shard.box.tensor)}"
                    yield name, shard.box.start, region(local[shard.local], shard)

    def _boxes(self, *, given_only: bool) -> Iterator[tuple[Box, dict[str, Tensor]]]:
        """Boxes of HF tensors of which this rank holds masters and moments, and views of these."""
        left_out = self.held.copies if given_only else ()
        shards = by_local(shard for shard in self.held.shards if shard not in left_out)
        for part in self.ranges:
            shape = self.held.parameters[part.local].shape
            for start, size, at in flat_boxes(part.start, part.stop, shape):
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
    width, at = prod(shape[1:]), start
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
