"""Storage for torch.distributed.checkpoint without pickle: safetensors data and JSON metadata.

DCP plans who writes and reads which box of which tensor, whatever the two numbers of ranks; its own file storage keeps
metadata as a pickle, which must not be loaded from a file. Each rank writes one file a kind of content (the part of a
key before its first dot) with verl's file names; a stored chunk is named `<key>@<offsets>`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlsys.utils.atomic import fsync_file, write_text_durable
from rlsys.utils.errors import CheckpointError

METADATA = "tensors.json"


def data_file(kind: str) -> str:
    return f"{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.safetensors"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class SafetensorsWriter(StorageWriter):
    """Writes into an existing directory; every file is on disk when DCP's save returns."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        results = []
        for item in plan.items:
            kind = item.index.fqn.partition(".")[0]
            name = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            files[kind][name] = tensor.detach().contiguous()
            stored = {"file": data_file(kind), "name": name}
            results.append(WriteResult(item.index, tensor.nbytes, stored))
        for kind, tensors in files.items():
            path = self.directory / data_file(kind)
            save_file(tensors, path)
            fsync_file(path)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for part in results for result in part}
        tensors = {
            key: {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "chunks": [
                    {
                        "offset": list(chunk.offsets),
                        "shape": list(chunk.sizes),
                        **stored[MetadataIndex(key, chunk.offsets)],
                    }
                    for chunk in entry.chunks
                ],
            }
            for key, entry in sorted(metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        write_text_durable(self.directory / METADATA, json.dumps(tensors, indent=1))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads what SafetensorsWriter wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries, stored = {}, {}
        for key, entry in read_tensor_index(self.directory).items():
            chunks = []
            for chunk in entry["chunks"]:
                offset = torch.Size(chunk["offset"])
                chunks.append(ChunkStorageMetadata(offset, torch.Size(chunk["shape"])))
                stored[MetadataIndex(key, offset)] = (chunk["file"], chunk["name"])
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            entries[key] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(state_dict_metadata=entries, storage_data=stored)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file = defaultdict(list)
        for item in plan.items:
            file, name = self._stored[item.storage_index]
            by_file[file].append((item, name))
        for file, items in sorted(by_file.items()):
            with safe_open(self.directory / file, framework="pt") as tensors:
                for item, name in items:
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    box = tuple(slice(start, start + length) for start, length in spans)
                    value = tensors.get_slice(name)[box] if box else tensors.get_tensor(name)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(value)
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_tensor_index(directory: Path) -> dict[str, Any]:
    """Shape, dtype and chunks of every stored tensor by key; CheckpointError if it cannot be read."""
    try:
        return json.loads((directory / METADATA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {directory / METADATA}: {error}") from error


STORAGE_ERRORS = (OSError, SafetensorError)
