"""The values a Megatron model is built from; nothing here imports Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelOptions:
    """How the model computes: `dtype` a torch name, `fp8` a Transformer Engine format (e4m3, hybrid), `overrides`
    further settings of Megatron's transformer configuration."""

    dtype: str = "float32"
    recompute: bool = False
    fp8: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    chunk_elements: int | None = None
