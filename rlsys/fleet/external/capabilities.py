"""From where a running server of each version can load weights."""

from collections.abc import Mapping, Sequence

from rlsys.rollout.versions import VersionTable, version_table

Capabilities = Sequence[str]
"""`files` for a whole model, `adapters` for LoRA adapters; `images` in prompts."""
ALL: Capabilities = ["files", "adapters", "images"]
SERVERS: Mapping[str, VersionTable[Capabilities]] = {
    "vllm": version_table("vllm_server"),
    "sglang": version_table("sglang_server"),
}
"""What servers can load; one that does not report its version is treated as the newest."""
