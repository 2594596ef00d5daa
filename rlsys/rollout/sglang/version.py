"""Which versions of SGLang SGLangRollout speaks to."""

from __future__ import annotations

from rlsys.rollout.versions import NAMES_ONLY, Row, VersionTable

SGLANG: VersionTable[bool] = VersionTable(
    "SGLang in this process",
    rows=(
        Row(">=0.5.15,<0.5.24", True, "0.5.16 ran on H200 GPUs, 0.5.23 on CPUs; the others: names checked"),
        Row(">=0.5.12,<0.5.15", True, f"{NAMES_ONLY}; requires an older transformers than rlsys does"),
        Row(
            ">=0.4.4,<0.5.12",
            None,
            "lacks places where our schedulers hook in; serve it and write rollout.name=sglang_remote",
        ),
    ),
    distributions=("sglang",),
    without="docs/engines.md says how to install it for actor_rollout_ref.rollout.name=sglang; or write hf",
)
"""Every name that the adapter uses is the same in the versions that it serves, so there is nothing to adapt."""
