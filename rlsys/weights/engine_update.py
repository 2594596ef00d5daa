"""A rollout engine while a transfer writes into it: its parameters, and staging for what only its loader can place."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine
from rlsys.types import WeightLayout
from rlsys.weights.layout import device_of, dtype_of, whole_shard

STAGED = "loader:"


class EngineUpdate:
    """An update of one engine, which is quarantined from `begin` to `finish`."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.layout = with_staging(engine.weight_layout())
        self._staged: dict[str, Tensor] = {}

    def begin(self) -> Mapping[str, Tensor]:
        """Quarantine the engine; returns `tensors()`."""
        self.engine.begin_update()
        return self.tensors()

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors to write into by local name: the engine's own, and staging tensors for its loader."""
        own = self.engine.local_tensors()
        device = device_of(own)
        for name in self.layout.loader:
            if name not in self._staged:
                dtype = dtype_of(self.layout.dtypes[name])
                self._staged[name] = torch.empty(self.layout.full_shapes[name], dtype=dtype, device=device)
        return {**own, **{STAGED + name: tensor for name, tensor in self._staged.items()}}

    def finish(self, version: int) -> None:
        """Load the staged tensors through the engine's loader and release the engine."""
        if self._staged:
            self.engine.load(list(self._staged.items()))
            self._staged = {}
        self.engine.finish_update(version)


def with_staging(layout: WeightLayout) -> WeightLayout:
    """The layout with one shard for each tensor in `loader`: whole, in a staging tensor of `EngineUpdate`."""
    staged = (whole_shard(name, layout.full_shapes[name], STAGED + name) for name in layout.loader)
    return replace(layout, shards=(*layout.shards, *staged)) if layout.loader else layout
