"""Boxes of tensors in safetensors files, one file per rank and kind of content, with a JSON index over all of them.

Nothing is pickled, unlike the index of torch.distributed.checkpoint's own storage. The kind is the part of a key before
its first dot; file names are verl's; a stored box is named `<key>@<offsets>`.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from operator import add, gt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlsys.engines.mesh import gather_json, together
from rlsys.models.hf import open_safetensors
from rlsys.telemetry.jsonl import JsonObject
from rlsys.types import Shapes
from rlsys.utils.atomic import fsync_file, write_whole
from rlsys.utils.boxes import overlap, relative, slices
from rlsys.utils.errors import CheckpointError, raised_as

METADATA = "tensors.json"
StoredBoxes = Iterable[tuple[str, Sequence[int], Tensor]]
"""(key, offset in the whole tensor, values)."""


Entries = Sequence[tuple[str, str, JsonObject]]
"""(key, dtype, chunk) of the boxes that a rank has written."""


def write_index(directory: Path, entries: Entries, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write on rank 0 where each rank's boxes are. Collective.

    `shapes` are the whole tensors'; no element may be written twice.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for key, dtype, chunk in (entry for part in gather_json(entries) for entry in part):
        tensors.setdefault(key, {"dtype": dtype, "shape": list(shapes[key]), "chunks": []})["chunks"].append(chunk)
    index = json.dumps(dict(sorted(tensors.items())), indent=1).encode()
    together(lambda: write_whole(directory / METADATA, index, durable=True) if tensors else None, only_first=True)


def write_files(directory: Path, name_end: str, boxes: StoredBoxes) -> tuple[list[str], Entries]:
    """Write this rank's boxes into a file for each kind; returns the names of the files, and what they hold."""
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    entries = []
    for key, start, tensor in boxes:
        name = f"{key}@{','.join(map(str, start))}"
        file = f"{key.partition('.')[0]}_{name_end}.safetensors"
        files[file][name] = tensor.detach().contiguous()
        chunk = {"offset": list(start), "shape": list(tensor.shape), "file": file, "name": name}
        entries.append((key, str(tensor.dtype).removeprefix("torch."), chunk))
    for file, tensors in files.items():
        save_file(tensors, directory / file)
        fsync_file(directory / file)
    return sorted(files), entries


def read_tensor_index(directory: Path) -> JsonObject:
    """Shape, dtype and chunks of every stored tensor by key; CheckpointError if it cannot be read."""
    with raised_as(CheckpointError, f"cannot read {directory / METADATA}", OSError, ValueError):
        return json.loads((directory / METADATA).read_text())


def saved_tensors(
    directory: Path, index: JsonObject, prefix: str = "", *, rename: Callable[[str], str] = str
) -> "dict[str, PiecedTensor]":
    """The tensors of a checkpoint whose keys begin with `prefix`, by what `rename` makes of the rest of their keys."""
    entries = {rename(key.removeprefix(prefix)): entry for key, entry in index.items() if key.startswith(prefix)}
    pieces = {
        name: [
            StoredBox(tuple(c["offset"]), tuple(c["shape"]), directory / c["file"], c["name"], (0,) * len(c["shape"]))
            for c in entry["chunks"]
        ]
        for name, entry in entries.items()
    }
    return pieced_tensors({name: tuple(entry["shape"]) for name, entry in entries.items()}, pieces)


@dataclass(frozen=True)
class StoredBox:
    """A box of an HF tensor, kept from `at` of tensor `key` in `file`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    key: str
    at: tuple[int, ...]


def pieced_tensors(shapes: Shapes, pieces: Mapping[str, Sequence[StoredBox]]) -> "dict[str, PiecedTensor]":
    """Tensors in pieces by name; files are opened when they are read."""
    open_file = cache(open_safetensors)
    return {name: PiecedTensor(name, shape, pieces.get(name, ()), open_file) for name, shape in shapes.items()}


class PiecedTensor:
    """A StoredTensor in pieces; `copies` are pieces of which another file has the same box, each with that one."""

    def __init__(
        self, name: str, shape: tuple[int, ...], pieces: Sequence[StoredBox], open_file: Callable[[Path], Any]
    ) -> None:
        self.name, self.shape, self._open = name, shape, open_file
        self._pieces: dict[object, StoredBox] = {}
        placed = [(self._pieces.setdefault((piece.start, piece.shape), piece), piece) for piece in pieces]
        self.copies = [(held, piece) for held, piece in placed if held is not piece]

    @cached_property
    def dtype(self) -> str:
        """CheckpointError unless every piece is inside what its file has under its key, and of one type."""
        dtypes = {}
        for piece in self._pieces.values():
            stored = self._slice(piece)
            shape, ends = tuple(stored.get_shape()), tuple(map(add, piece.at, piece.shape))
            if len(shape) != len(ends) or any(map(gt, ends, shape)):
                raise CheckpointError(f"{piece.file}: {piece.key} is {shape}, {self.name} {self.shape} needs {ends}")
            dtypes[stored.get_dtype()] = piece.file.name
        if len(dtypes) != 1:
            there = ", ".join(f"{dtype} in {file}" for dtype, file in dtypes.items()) or "nowhere"
            raise CheckpointError(f"{self.name} must be of one type in all files, and is {there}")
        return next(iter(dtypes))

    def read(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A box of the tensor; CheckpointError for elements no piece has. Only the box's parts are read."""
        box, held = None, 0
        for piece in self._pieces.values():
            if (shared := overlap(start, shape, piece.start, piece.shape)) is None:
                continue
            low, size = shared
            part = self.read_piece(piece, low, size)
            if size == tuple(shape):
                return part
            if box is None:
                box = torch.empty(tuple(shape), dtype=part.dtype)
            box[slices(relative(low, start), size)] = part
            held += prod(size)
        if box is None or held != prod(shape):
            raise CheckpointError(f"{self.name}: the files hold {held} of {prod(shape)} elements from {tuple(start)}")
        return box

    def read_piece(self, piece: StoredBox, low: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """The part of a piece of shape `size` from `low` on in the tensor."""
        if not size:
            return self._open(piece.file).get_tensor(piece.key)
        return self._slice(piece)[slices(tuple(map(add, piece.at, relative(low, piece.start))), size)]

    def _slice(self, piece: StoredBox) -> Any:
        with raised_as(CheckpointError, f"{piece.file} lacks {piece.key}", SafetensorError):
            return self._open(piece.file).get_slice(piece.key)
