"""Weights stored in safetensors files, whole or in pieces, read box by box by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlsys.utils.boxes import overlap, relative, slices
from rlsys.utils.errors import CheckpointError


class Weights(Protocol):
    """HF tensors by name; `dtype` is safetensors' name of the stored type, such as BF16."""

    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class StoredBox:
    """A box of an HF tensor, kept from `at` of tensor `key` in `file`. Leading entries of `at` beyond the box's
    dimensions are indices, as of one expert in a stack."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    at: tuple[int, ...]


class StoredWeights:
    """Weights in pieces. CheckpointError, when made, unless every piece is inside what its file has under its key and
    the pieces of a tensor are of one type."""

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
        self._keys: dict[str, frozenset[str]] = {}
        self._dtypes = {name: self._checked(name) for name in shapes}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return self._dtypes[name]

    def keys_of(self, file: str) -> frozenset[str]:
        """What a file of the directory has."""
        self._open(file)
        return self._keys[file]

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
        stored = self._open(piece.file)
        if not size:
            return stored.get_tensor(piece.key)
        extra = len(piece.at) - len(size)
        begins = (a + lo - s for a, lo, s in zip(piece.at[extra:], low, piece.start, strict=True))
        region = (*(slice(i, i + 1) for i in piece.at[:extra]), *(slice(b, b + n) for b, n in zip(begins, size)))
        return stored.get_slice(piece.key)[region].reshape(size)

    def _checked(self, name: str) -> str:
        dtypes = {}
        for piece in self._pieces[name]:
            if piece.key not in self.keys_of(piece.file):
                raise CheckpointError(f"{self._directory / piece.file} lacks {piece.key}, a part of {name}")
            stored = self._open(piece.file).get_slice(piece.key)
            shape, extra = stored.get_shape(), len(piece.at) - len(piece.shape)
            ends = [a + n for a, n in zip(piece.at, (1,) * extra + piece.shape, strict=True)]
            if len(shape) != len(ends) or any(end > size for end, size in zip(ends, shape)):
                raise CheckpointError(
                    f"{self._directory / piece.file}: {piece.key} is {tuple(shape)} and should reach {tuple(ends)},"
                    f" as a part of {name} {self._shapes[name]}"
                )
            dtypes[stored.get_dtype()] = piece.file
        if len(dtypes) != 1:
            backend_found = ", ".join(f"{dtype} in {file}" for dtype, file in dtypes.items()) or "nowhere"
            raise CheckpointError(f"{name} must be of one type in all files, and is {backend_found}")
        return next(iter(dtypes))

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self._directory / file} cannot be read: {error}") from error
            self._keys[file] = frozenset(self._files[file].keys())
        return self._files[file]


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, row-major."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Supplemented:
    """The tensors of one source and, of others, those named that it lacks."""

    def __init__(self, first: Weights, second: Weights, names: Iterable[str]) -> None:
        there = second.names()
        self._sources = dict.fromkeys(first.names(), first)
        self._sources |= {name: second for name in names if name not in self._sources and name in there}

    def names(self) -> Collection[str]:
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape(name)

    def dtype(self, name: str) -> str:
        return self._sources[name].dtype(name)

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self._sources[name].read(name, start, shape)


def read_whole(weights: Weights, name: str) -> Tensor:
    """All of one tensor."""
    shape = weights.shape(name)
    return weights.read(name, (0,) * len(shape), shape)
