"""What servers of which version can do beside answering requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlsys.rollout.versions import NAMES_ONLY, Row, VersionTable

Ability = Literal["files", "adapters", "in_place", "group"]


@dataclass(frozen=True)
class Abilities:
    """Which weights a running server takes: a whole model from `files`, LoRA `adapters`, those `in_place` of one with
    the same name, a whole model over a process `group`."""

    files: bool = True
    adapters: bool = True
    in_place: bool = True
    group: bool = True

    def lacking(self, needed: Ability) -> str:
        """Why what is needed cannot be done; empty where it can."""
        return "" if getattr(self, needed) else f"servers of this version take no weights by '{needed}'"


_VLLM, _SGLANG = Abilities(group=False), Abilities(in_place=False)
SERVERS: Mapping[str, VersionTable[Abilities]] = {
    "vllm": VersionTable(
        "a vLLM server of version",
        (
            Row(">=0.34.dev0", _VLLM, "newer than any that was read: taken as the newest of those"),
            Row(">=0.16,<0.34", _VLLM, "0.32.0 ran on CPUs; the others: names checked; weights are named from 0.29 on"),
            Row(">=0.15.1,<0.16", replace(_VLLM, files=False), f"{NAMES_ONLY}; weights as adapters only"),
            Row(
                ">=0.8.5,<0.15.1",
                replace(_VLLM, files=False, in_place=False),
                f"{NAMES_ONLY}; weights as adapters under new names only",
            ),
        ),
    ),
    "sglang": VersionTable(
        "an SGLang server of version",
        (
            Row(">=0.5.24.dev0", _SGLANG, "newer than any that was read: taken as the newest of those"),
            Row(">=0.5.1,<0.5.24", _SGLANG, "0.5.23 ran on CPUs; the others: names checked"),
            Row(">=0.4.9,<0.5.1", _SGLANG, f"{NAMES_ONLY}; tokens are not stamped with their weights"),
            Row(
                ">=0.4.4,<0.4.9",
                replace(_SGLANG, adapters=False, group=False),
                f"{NAMES_ONLY}; weights from files only; tokens are not stamped with their weights",
            ),
        ),
    ),
}


def abilities_of(kind: str, version: str) -> Abilities:
    """What a server can do; one that does not tell its version is taken as the newest. ConfigError where too old."""
    table = SERVERS[kind]
    return table.adapter(version) if version else table.rows[0].adapter or Abilities()
