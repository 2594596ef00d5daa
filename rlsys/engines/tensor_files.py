"""Boxes of tensors in safetensors files, one file per rank and kind of content, with a JSON index over all of them.

Nothing is pickled, unlike the index of torch.distributed.checkpoint's own storage. The kind is the part of a key before
its first dot; file names are verl's; a stored box is named `<key>@<offsets>`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, gt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlsys.engines.mesh import gather_json, together
from rlsys.models.hf import open_safetensors
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


def saved_tensors(
    directory: Path, index: Mapping[str, Any], prefix: str = "", *, rename: Callable[[str], str] = str
) -> StoredWeights:
    """The tensors of a checkpoint whose keys begin with `prefix`, by what `rename` makes of the rest of their keys."""
    entries = {rename(key.removeprefix(prefix)): entry for key, entry in index.items() if key.startswith(prefix)}
    pieces = {
        name: [
            StoredBox(tuple(c["offset"]), tuple(c["shape"]), c["file"], c["name"], (0,) * len(c["shape"]))
            for c in entry["chunks"]
        ]
        for name, entry in entries.items()
    }
    return StoredWeights(directory, {name: tuple(entry["shape"]) for name, entry in entries.items()}, pieces)


@dataclass(frozen=True)
class StoredBox:
    """A box of an HF tensor, kept from `at` of tensor `key` in `file`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    at: tuple[int, ...]


class StoredWeights:
    """Tensors in pieces, as a TensorSource; files are opened when they are read."""

    def __init__(
        self, directory: Path, shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, Sequence[StoredBox]]
    ) -> None:
        self._directory, self._shapes = directory, dict(shapes)
        self._pieces: dict[str, list[StoredBox]] = {}
        self._copies: dict[str, list[tuple[StoredBox, StoredBox]]] = {}
        for name in shapes:
            first: dict[Any, StoredBox] = {}
            for piece in pieces.get(name, ()):
                held = first.setdefault((piece.start, piece.shape), piece)
                if held is not piece:
                    self._copies.setdefault(name, []).append((held, piece))
            self._pieces[name] = list(first.values())
        self._files: dict[str, Any] = {}
        self._dtypes: dict[str, str] = {}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """safetensors' name of the type, as BF16. CheckpointError unless every piece is inside what its file has under
        its key, and of one type."""
        if name not in self._dtypes:
            self._dtypes[name] = self._checked(name)
        return self._dtypes[name]

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A box of a tensor; CheckpointError for elements no piece has. Only the box's parts are read."""
        box, held = None, 0
        for piece in self._pieces[name]:
            if (shared := overlap(start, shape, piece.start, piece.shape)) is None:
                continue
            low, size = shared
            part = self._part(piece, low, size)
            if size == tuple(shape):
                return part
            if box is None:
                box = torch.empty(tuple(shape), dtype=part.dtype)
            box[slices(relative(low, start), size)] = part
            held += prod(size)
        if box is None or held != prod(shape):
            raise CheckpointError(f"{name}: the files hold {held} of {prod(shape)} elements from {tuple(start)}")
        return box

    def differing_copies(self) -> Iterator[str]:
        """Boxes that several files hold, and not with the same bits."""
        for name, pairs in self._copies.items():
            for first, other in pairs:
                one, two = (self._part(piece, piece.start, piece.shape) for piece in (first, other))
                if one.dtype != two.dtype or not torch.equal(bytes_of(one), bytes_of(two)):
                    yield f"{name} in {first.file} and in {other.file}"

    def _part(self, piece: StoredBox, low: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if not size:
            return self._open(piece.file).get_tensor(piece.key)
        first = tuple(map(add, piece.at, relative(low, piece.start)))
        return self._slice(piece)[slices(first, size)]

    def _checked(self, name: str) -> str:
        dtypes = {}
        for piece in self._pieces[name]:
            stored = self._slice(piece)
            shape, ends = tuple(stored.get_shape()), tuple(map(add, piece.at, piece.shape))
            if len(shape) != len(ends) or any(map(gt, ends, shape)):
                raise CheckpointError(
                    f"{self._directory / piece.file}: {piece.key} is {shape} and should reach {ends},"
                    f" as a part of {name} {self._shapes[name]}"
                )
            dtypes[stored.get_dtype()] = piece.file
        if len(dtypes) != 1:
            there = ", ".join(f"{dtype} in {file}" for dtype, file in dtypes.items()) or "nowhere"
            raise CheckpointError(f"{name} must be of one type in all files, and is {there}")
        return next(iter(dtypes))

    def _slice(self, piece: StoredBox) -> Any:
        try:
            return self._open(piece.file).get_slice(piece.key)
        except SafetensorError as error:
            raise CheckpointError(f"{self._directory / piece.file} lacks {piece.key}: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = open_safetensors(self._directory / file)
        return self._files[file]


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, row-major."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
