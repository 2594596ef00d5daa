"""Checkpoints of an FSDPEngine: this rank's rows of every tensor, loadable on another number of ranks.

Tensors have the names and shapes in which transformers saves them, so that every engine loads what another one saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlsys.engines.fsdp.optim import BLOCK_ELEMENTS, local_of, tensor_parallel_part
from rlsys.engines.fsdp.sharding import held_shards
from rlsys.engines.mesh import Ranks
from rlsys.engines.tensor_files import StoredBoxes, read_tensor_index, saved_tensors
from rlsys.models.stacked import Stacks, saved_shapes
from rlsys.telemetry.jsonl import JsonObject
from rlsys.types import Box
from rlsys.utils.boxes import slices


@dataclass(frozen=True)
class FSDPState:
    """A Contents of rlsys.engines.checkpoint: sharded parameters by name, this rank's parts of the optimizer's moments
    by `<moment>.<name>`, and `parts` among "model", "optimizer" and "extra".

    What is named absmax are the scales of the blocks of a rank's 8-bit moments: a row of a matrix for each rank.
    """

    ranks: Ranks
    stacks: Stacks
    parameters: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    parts: frozenset[str]

    @property
    def layout(self) -> tuple[str, JsonObject]:
        sizes = {"world_size": self.ranks.world_size, "shard_size": self.ranks.copy_size}
        return "fsdp_config.json", {"FSDP_version": 2, **sizes}

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Prefix of the keys in the checkpoint, name of the sharded parameter, this rank's rows."""
        for name, parameter in self.parameters.items() if "model" in self.parts else ():
            yield "model.", name, local_of(parameter)
        for key, local in self.moments.items():
            moment, _, name = key.partition(".")
            if not moment.startswith("absmax"):
                yield f"optim.{moment}.", name, local

    def _scales(self) -> Iterator[tuple[str, Tensor]]:
        return ((key, local) for key, local in self.moments.items() if key.startswith("absmax"))

    def shapes(self) -> dict[str, Sequence[int]]:
        shapes: dict[str, Sequence[int]] = {
            prefix + saved: shape
            for prefix, name, _ in self._tensors()
            for saved, shape in saved_shapes(name, self.parameters[name].shape, self.stacks).items()
        }
        for key, _ in self._scales():
            rows, *sizes = tensor_parallel_part(self.parameters[key.partition(".")[2]])[1]
            num_elements = -(-rows // self.ranks.shard_size) * prod(sizes)
            shapes[f"optim.{key}"] = (self.ranks.copy_size, -(-num_elements // BLOCK_ELEMENTS))
        return shapes

    def _boxes(self, *, once: bool = False) -> Iterator[tuple[str, Box, Tensor]]:
        """What this rank holds of each key, and its values, live; `once` without what tensor parallelism copies."""
        for prefix, name, local in self._tensors():
            if once and self.ranks.rank % self.ranks.tp_size and tensor_parallel_part(self.parameters[name])[0] is None:
                continue
            for shard in held_shards(name, self.parameters[name], self.ranks, self.stacks):
                yield prefix + shard.box.tensor, shard.box, local[slices(shard.local_start, shard.box.shape)]
        for key, scales in self._scales():
            if scales.numel():
                number = self.ranks.rank % self.ranks.copy_size
                yield f"optim.{key}", Box(key, (number, 0), (1, len(scales))), scales[None]

    def boxes(self) -> StoredBoxes:
        first_copy = self.ranks.rank < self.ranks.copy_size
        return ((key, box.start, values) for key, box, values in self._boxes(once=True) if first_copy)

    @torch.no_grad()
    def read(self, path: Path) -> None:
        source = saved_tensors(path, read_tensor_index(path) if "model" in self.parts or self.moments else {})
        for key, box, values in self._boxes():
            values.copy_(source[key].read(box.start, box.shape))
