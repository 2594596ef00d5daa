"""Checkpoints of an FSDPEngine through torch.distributed.checkpoint, loadable on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from rlsys.engines.dcp_storage import SafetensorsReader, SafetensorsWriter, data_file
from rlsys.utils.errors import CheckpointError


@dataclass(frozen=True)
class FSDPState:
    """A Contents of rlsys.engines.checkpoint: sharded parameters by name, this rank's parts of the optimizer's moments
    by `<moment>.<name>`, whether the random generators are included, and over how many ranks parameters are sharded."""

    model: Mapping[str, Any]
    moments: Mapping[str, Tensor]
    parameters: Mapping[str, Any]
    extra: bool
    shard_size: int

    @property
    def layout(self) -> tuple[str, Mapping[str, Any]]:
        sizes = {"world_size": dist.get_world_size(), "shard_size": self.shard_size}
        return "fsdp_config.json", {"FSDP_version": 2, **sizes}

    def tensors(self) -> dict[str, Any]:
        """DTensors under the keys of the checkpoint."""
        optim = {}
        for key, local in self.moments.items():
            moment, _, name = key.partition(".")
            optim[f"optim.{moment}.{name}"] = _like(self.parameters[name], local)
        return {**{f"model.{name}": p.detach() for name, p in self.model.items()}, **optim}

    def shapes(self) -> dict[str, Sequence[int]]:
        return {key: tensor.shape for key, tensor in self.tensors().items()}

    def write(self, staging: Path) -> list[str]:
        tensors = self.tensors()
        if tensors:
            _unwrapped(lambda: dcp.save(tensors, storage_writer=SafetensorsWriter(staging)))
        return sorted({data_file(key.partition(".")[0]) for key in tensors})

    def read(self, path: Path) -> None:
        if tensors := self.tensors():
            _unwrapped(lambda: dcp.load(tensors, storage_reader=SafetensorsReader(path)))


def _like(parameter: Any, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _unwrapped(work: Callable[[], Any]) -> None:
    """DCP raises every rank's errors on all ranks; raise each where it happened."""
    try:
        work()
    except CheckpointException as error:
        own = error.failures.get(dist.get_rank())
        if own is not None:
            raise CheckpointError(str(own[0])) from error
