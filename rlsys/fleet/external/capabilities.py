"""What each server version can do besides answering requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlsys.rollout.versions import NAMES_ONLY, VersionRow, VersionTable

WeightSource = Literal["files", "adapters"]


@dataclass(frozen=True)
class Capabilities:
    """How a running server can load weights: a whole model from `files`, LoRA `adapters`."""

    files: bool = True
    adapters: bool = True

    def lacking(self, needed: WeightSource) -> str:
        """Why the server cannot load weights from this source; empty if it can."""
        return "" if getattr(self, needed) else f"servers of this version cannot load weights by '{needed}'"


_ALL, _ADAPTERS, _FILES = Capabilities(), Capabilities(files=False), Capabilities(adapters=False)
SERVERS: Mapping[str, VersionTable[Capabilities]] = {
    "vllm": VersionTable(
        "a vLLM server of version",
        (
            VersionRow(">=0.34.dev0", _ALL, "newer than any that was read: treated like the newest of those"),
            VersionRow(">=0.16,<0.34", _ALL, "0.32.0 ran on CPUs; the others: names checked; weights named since 0.29"),
            VersionRow(">=0.8.5,<0.16", _ADAPTERS, f"{NAMES_ONLY}; weights as adapters only"),
        ),
    ),
    "sglang": VersionTable(
        "an SGLang server of version",
        (
            VersionRow(">=0.5.24.dev0", _ALL, "newer than any that was read: treated like the newest of those"),
            VersionRow(">=0.5.1,<0.5.24", _ALL, "0.5.23 ran on CPUs; the others: names checked"),
            VersionRow(">=0.4.9,<0.5.1", _ALL, f"{NAMES_ONLY}; tokens are not stamped with their weights"),
            VersionRow(
                ">=0.4.4,<0.4.9",
                _FILES,
                f"{NAMES_ONLY}; weights from files only; tokens are not stamped with their weights",
            ),
        ),
    ),
}


def capabilities_of(kind: str, version: str) -> Capabilities:
    """What a server can do; one that does not report its version is treated as the newest. ConfigError if too old."""
    table = SERVERS[kind]
    return table.features(version) if version else table.rows[0].features or Capabilities()
