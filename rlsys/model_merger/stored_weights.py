"""Weights by their Hugging Face names and the types they are stored in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from rlsys.models.hf import TensorSource


class Weights(TensorSource, Protocol):
    """`dtype` is safetensors' name of the stored type, such as BF16."""

    def dtype(self, name: str) -> str: ...


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
