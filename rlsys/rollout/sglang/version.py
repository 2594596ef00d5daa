"""Which SGLang is installed, and whether the adapter here speaks to it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from rlsys.utils.errors import ConfigError

SUPPORTED = SpecifierSet(">=0.5.16,<0.5.24")
"""Seen to run: 0.5.23 on CPUs; every name that is used stands in 0.5.16 too."""


def installed_sglang() -> str:
    """The version of SGLang here; ConfigError when there is none or one that the adapter does not know."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang needs SGLang (docs/engines.md says how to install it); or write hf"
        ) from None
    if found not in SUPPORTED:
        raise ConfigError(f"sglang {found} is installed, rollout.name=sglang needs {SUPPORTED}; or write hf")
    return found
