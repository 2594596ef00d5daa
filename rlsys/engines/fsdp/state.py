"""Checkpoints of an FSDPEngine: this rank's rows of every tensor, loadable on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.engines.fsdp.optim import local_of
from rlsys.engines.fsdp.sharding import held_box
from rlsys.engines.mesh import Ranks
from rlsys.engines.tensor_files import SavedTensors, read_tensor_index, write_tensors
from rlsys.types import Box


@dataclass(frozen=True)
class FSDPState:
    """A Contents of rlsys.engines.checkpoint: sharded parameters by name, this rank's parts of the optimizer's moments
    by `<moment>.<name>`, and whether the random generators are included. `parameters` also has those not saved."""

    ranks: Ranks
    model: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    extra: bool

    @property
    def layout(self) -> tuple[str, Mapping[str, Any]]:
        sizes = {"world_size": self.ranks.world_size, "shard_size": self.ranks.shard_size}
        return "fsdp_config.json", {"FSDP_version": 2, **sizes}

    def _tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Keys of the checkpoint, the sharded parameter they belong to, and this rank's rows."""
        for name, parameter in self.model.items():
            yield f"model.{name}", parameter, local_of(parameter)
        for key, local in self.moments.items():
            yield f"optim.{key}", self.parameters[key.partition(".")[2]], local

    def shapes(self) -> dict[str, Sequence[int]]:
        return {key: tuple(parameter.shape) for key, parameter, _ in self._tensors()}

    def _boxes(self) -> Iterator[tuple[str, Box, Tensor]]:
        """This rank's rows; a rank may have none of a tensor."""
        for key, parameter, local in self._tensors():
            if (box := held_box(key, parameter, self.ranks)).shape[0]:
                yield key, box, local

    def write(self, staging: Path) -> list[str]:
        first_copy = self.ranks.rank < self.ranks.shard_size
        boxes = ((key, box.start, local) for key, box, local in self._boxes() if first_copy)
        return write_tensors(staging, boxes, self.shapes())

    @torch.no_grad()
    def read(self, path: Path) -> None:
        index = read_tensor_index(path) if self.model or self.moments else {}
        source = SavedTensors(path, index, "", as_saved=True)
        for key, box, local in self._boxes():
            local.copy_(source.read(key, box.start, box.shape))
