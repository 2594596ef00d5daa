"""Boxes of tensors in safetensors files, one file per rank and kind of content, with a JSON index over all of them.

Nothing is pickled, unlike the index of torch.distributed.checkpoint's own storage. The kind is the part of a key before
its first dot; file names are verl's; a stored box is named `<key>@<offsets>`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlsys.engines.mesh import gather_json, together
from rlsys.models.lora import hf_name
from rlsys.utils.atomic import fsync_file, write_text_durable
from rlsys.utils.boxes import overlap, relative, slices
from rlsys.utils.errors import CheckpointError

METADATA = "tensors.json"
STORAGE_ERRORS = (OSError, SafetensorError)
StoredBoxes = Iterable[tuple[str, Sequence[int], Tensor]]
"""(key, offset in the whole tensor, values)."""


def write_tensors(directory: Path, boxes: StoredBoxes, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Write this rank's boxes, and on rank 0 the index; returns the names of this rank's files. Collective.

    `shapes` are the whole tensors'; no element may be written twice. CheckpointError on every rank if one fails.
    """
    errors = (*STORAGE_ERRORS, CheckpointError)
    files, entries = together(lambda: _write_files(directory, boxes), errors, CheckpointError)
    tensors: dict[str, dict[str, Any]] = {}
    for key, dtype, chunk in (entry for part in gather_json(entries) for entry in part):
        tensor = tensors.setdefault(key, {"dtype": dtype, "shape": list(shapes[key]), "chunks": []})
        tensor["chunks"].append(chunk)
    index, writes = json.dumps(dict(sorted(tensors.items())), indent=1), dist.get_rank() == 0 and tensors
    together(lambda: write_text_durable(directory / METADATA, index) if writes else None, errors, CheckpointError)
    return files


def _write_files(directory: Path, boxes: StoredBoxes) -> tuple[list[str], list[tuple[str, str, dict[str, Any]]]]:
    """Names of this rank's files, and (key, dtype, chunk) of what they hold."""
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    entries = []
    for key, start, tensor in boxes:
        kind, name = key.partition(".")[0], f"{key}@{','.join(map(str, start))}"
        file = f"{kind}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.safetensors"
        files[file][name] = tensor.detach().contiguous()
        chunk = {"offset": list(start), "shape": list(tensor.shape), "file": file, "name": name}
        entries.append((key, str(tensor.dtype).removeprefix("torch."), chunk))
    for file, tensors in files.items():
        save_file(tensors, directory / file)
        fsync_file(directory / file)
    return sorted(files), entries


def read_tensor_index(directory: Path) -> dict[str, Any]:
    """Shape, dtype and chunks of every stored tensor by key; CheckpointError if it cannot be read."""
    try:
        return json.loads((directory / METADATA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {directory / METADATA}: {error}") from error


class SavedTensors:
    """Stored tensors whose keys begin with `prefix`, as a TensorSource: boxes assembled from stored ones."""

    def __init__(self, path: Path, index: Mapping[str, Any], prefix: str, *, as_saved: bool = False) -> None:
        self.path, self.prefix = path, prefix
        keys = {key: key.removeprefix(prefix) for key in index if key.startswith(prefix)}
        self._index = {name if as_saved else hf_name(name): index[key] for key, name in keys.items()}
        self._open: dict[str, Any] = {}

    def names(self) -> Collection[str]:
        return self._index.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._index[name]["shape"])

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        entry = self._index[name]
        values = torch.empty(tuple(shape), dtype=getattr(torch, entry["dtype"]))
        for chunk in entry["chunks"]:
            if (shared := overlap(start, shape, chunk["offset"], chunk["shape"])) is None:
                continue
            first, extent = shared
            here, there = (slices(relative(first, origin), extent) for origin in (start, chunk["offset"]))
            values[here] = self._file(chunk["file"]).get_slice(chunk["name"])[there]
        return values

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]
