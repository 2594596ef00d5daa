"""Which versions of SGLang SGLangRollout speaks to."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.rollout.versions import NAMES_ONLY, Row, VersionTable

OLD_TRANSFORMERS = f"{NAMES_ONLY}; requires an older transformers than rlsys does"


@dataclass(frozen=True)
class SGLangAdapter:
    """`decode`: how the arguments of CUDA graphs end that are for decoding, where those of prompts have their own."""

    decode: str = "_decode"


SGLANG = VersionTable(
    "SGLang in this process",
    rows=(
        Row(">=0.5.15,<0.5.24", SGLangAdapter(), "0.5.16 ran on H200 GPUs, 0.5.23 on CPUs; the others: names checked"),
        Row(">=0.5.14,<0.5.15", SGLangAdapter(), OLD_TRANSFORMERS),
        Row(">=0.5.12,<0.5.14", SGLangAdapter(decode=""), OLD_TRANSFORMERS),
        Row(
            ">=0.4.4,<0.5.12",
            None,
            "lacks places where our schedulers hook in; serve it and write rollout.name=sglang_remote",
        ),
    ),
    distributions=("sglang",),
    without="docs/engines.md says how to install it for actor_rollout_ref.rollout.name=sglang; or write hf",
)
