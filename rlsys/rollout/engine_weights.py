"""An engine's own parameters, written in place by a learned layout, or filled through its own loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError


class LiveWeights:
    """The engine's own parameters, written in place.

    `expected` are the HF tensors by shape and type. Nothing can be pushed by plan before `adopt`.
    """

    def __init__(self, expected: Mapping[str, Tensor], aliases: Mapping[str, str], model: Callable[[], Any]) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in expected.items()}
        self.aliases, self._model = aliases, model
        self._layout: WeightLayout | None = None
        self._views: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict

    def adopt(self, layout: WeightLayout, views: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
        """Use what was learned: the layout, and the tensors it speaks of out of the parameters."""
        self._layout, self._views = layout, views

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model().named_parameters()}

    def layout(self, *, rank: int, host: str) -> WeightLayout:
        if self._layout is None:
            raise WeightTransferError("the layout of the rollout engine's parameters has not been learned yet")
        return replace(self._layout, rank=rank, host=host)

    def tensors(self) -> Mapping[str, Tensor]:
        return self._views(self.parameters())

    @torch.no_grad()
    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Through the engine's own loader."""
        for name, tensor in bucket:
            shape = self.shapes.get(self.aliases.get(name, name))
            if shape is None:
                raise WeightTransferError(f"the rollout model has no tensor '{name}'")
            if shape != tuple(tensor.shape):
                raise WeightTransferError(f"tensor '{name}' has the wrong shape: {tuple(tensor.shape)} for {shape}")
        self._model().load_weights((name, tensor) for name, tensor in bucket if name not in self.aliases)

    def finish(self) -> None:
        """Nothing is left to do."""
