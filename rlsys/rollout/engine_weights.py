"""The tensors that new weights are written into: an engine's own parameters, or host copies that its loader packs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlsys.models.quantized import FP8_NAME, SCALE, scale_shape
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError

NamedTensors = Mapping[str, Tensor]


class EngineWeights:
    """An engine's own parameters, written in place by a learned layout or filled through the engine's own loader.

    `full` are the HF tensors by shape and type; `derive_fn`, also `finish`, has the engine derive again what it
    keeps beside its parameters. Weights cannot be pushed by plan before `adopt`.
    """

    def __init__(
        self, full: NamedTensors, aliases: Mapping[str, str], model_fn: Callable[[], Any], derive_fn: Callable[[], None]
    ) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in full.items()}
        self.aliases, self._model_fn, self.finish = aliases, model_fn, derive_fn
        self._layout: WeightLayout | None = None
        self._views: Callable[[NamedTensors], NamedTensors] = dict

    def adopt(self, layout: WeightLayout, views: Callable[[NamedTensors], NamedTensors]) -> None:
        """Use a learned layout; `views` maps the parameters to the tensors that it names."""
        self._layout, self._views = layout, views

    def quantise(self, names: Iterable[str]) -> None:
        """Take these matrices as float8 elements and scales, in the blocks that the model was made with."""
        block, _ = self._model_fn().config.quantization_config["weight_block_size"]
        for name in names:
            self.shapes[name + SCALE] = scale_shape(self.shapes[name], block)
            self.dtypes |= {name: FP8_NAME, name + SCALE: "float32"}

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model_fn().named_parameters()}

    def layout(self, *, rank: int, host: str) -> WeightLayout:
        if self._layout is None:
            raise WeightTransferError("the layout of the rollout engine's parameters has not been learned yet")
        return replace(self._layout, rank=rank, host=host)

    def tensors(self) -> NamedTensors:
        return self._views(self.parameters())

    @torch.no_grad()
    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Load full HF tensors through the engine's own loader."""
        for name, tensor in bucket:
            _check_shape(name, tensor, self.shapes.get(self.aliases.get(name, name)))
        self._model_fn().load_weights((name, tensor) for name, tensor in bucket if name not in self.aliases)


class HostWeights:
    """Every HF tensor whole in host memory, for engines that pack the weights of their layers."""

    def __init__(
        self, tensors: NamedTensors, aliases: Mapping[str, str], reload_fn: Callable[[NamedTensors], None]
    ) -> None:
        self._tensors, self._aliases, self._reload_fn = tensors, aliases, reload_fn

    def layout(self, *, rank: int, host: str) -> WeightLayout:
        return whole_layout(self._tensors, self._aliases, rank=rank, host=host)

    def tensors(self) -> NamedTensors:
        return self._tensors

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        copy_by_name(self._tensors, self._aliases, bucket)

    def finish(self) -> None:
        """Have the engine load all of them."""
        self._reload_fn(self._tensors)


def whole_layout(tensors: NamedTensors, aliases: Mapping[str, str], *, rank: int, host: str) -> WeightLayout:
    """The layout of HF tensors that are held whole under their own names."""
    shards = tuple(Shard(Box(n, (0,) * t.ndim, tuple(t.shape)), n, (0,) * t.ndim) for n, t in tensors.items())
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}
    return WeightLayout(rank, host, shards, shapes, dtypes, aliases)


@torch.no_grad()
def copy_by_name(held: NamedTensors, aliases: Mapping[str, str], bucket: Sequence[tuple[str, Tensor]]) -> None:
    """Copy full HF tensors into the held ones; WeightTransferError for an unknown name or a wrong shape."""
    for name, tensor in bucket:
        own = aliases.get(name, name)
        _check_shape(name, tensor, tuple(held[own].shape) if own in held else None)
        held[own].copy_(tensor)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...] | None) -> None:
    if expected is None:
        raise WeightTransferError(f"the rollout model has no tensor '{name}'")
    if expected != tuple(tensor.shape):
        raise WeightTransferError(f"tensor '{name}' has the wrong shape: {tuple(tensor.shape)} instead of {expected}")
