"""Import this before any `megatron.core`: it brings the CPU shim where there is no CUDA."""

from __future__ import annotations

import importlib.util
import warnings

import torch

from rlsys.utils.errors import ConfigError

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise ConfigError("strategy=megatron needs Megatron-Core: pip install -e '.[megatron]'")

warnings.filterwarnings("ignore", module=r"megatron\.core")
ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    import rlsys.models.megatron.shim  # noqa: F401
