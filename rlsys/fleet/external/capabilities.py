"""From where a running server of each version can load weights."""

from collections.abc import Mapping

from rlsys.rollout.versions import NAMES_ONLY, VersionRow, VersionTable

Capabilities = tuple[str, ...]
"""`files` for a whole model, `adapters` for LoRA adapters; `images` in prompts."""
ALL: Capabilities = ("files", "adapters", "images")
TEXT: Capabilities = ("files", "adapters")
SERVERS: Mapping[str, VersionTable[Capabilities]] = {
    "vllm": VersionTable(
        "a vLLM server of version",
        (
            VersionRow(">=0.26", ALL, "0.32.0 ran on CPUs; names checked up to 0.33; weights named since 0.29"),
            VersionRow(">=0.16,<0.26", TEXT, f"{NAMES_ONLY}; prompts without images"),
            VersionRow(">=0.8.5,<0.16", ("adapters",), f"{NAMES_ONLY}; weights as adapters only"),
        ),
    ),
    "sglang": VersionTable(
        "an SGLang server of version",
        (
            VersionRow(">=0.5.16", ALL, "0.5.23 ran on CPUs; names checked up to it"),
            VersionRow(">=0.5.1,<0.5.16", TEXT, f"{NAMES_ONLY}; prompts without images"),
            VersionRow(">=0.4.9,<0.5.1", TEXT, f"{NAMES_ONLY}; tokens are not stamped with their weights"),
            VersionRow(">=0.4.4,<0.4.9", ("files",), f"{NAMES_ONLY}; weights from files only; tokens are not stamped"),
        ),
    ),
}
"""What servers can load; one that does not report its version is treated as the newest."""
