"""The values a Megatron model is built from; nothing here imports Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Megatron's parallel sizes. Without `etp` experts are cut like everything else (`tp`); `sequence_parallel` shares
    what tensor parallelism leaves whole, and is off where tp is 1."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    first_layers: int | None = None
    last_layers: int | None = None

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp


@dataclass(frozen=True)
class ModelOptions:
    """How the model computes: `dtype` a torch name, `fp8` a Transformer Engine format (e4m3, hybrid), `overrides`
    further settings of Megatron's transformer configuration."""

    dtype: str = "float32"
    recompute: bool = False
    fp8: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    chunk_elements: int | None = None
