"""vLLM's log-probabilities as close to the trainer's as it offers: a float32 head and, on GPUs, batch invariance.

The head's logits are otherwise rounded to bfloat16, by up to 0.06 above 16, which is most of the avoidable difference.
With batch-invariant kernels a token's digits do not depend on the rest of its batch.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlsys.utils.errors import ConfigError

KEY = "actor_rollout_ref.rollout.full_determinism"
SWITCH = "VLLM_BATCH_INVARIANT"
OLDEST_GPU = (9, 0)


def aligned_arguments(arguments: Mapping[str, Any], *, device: str) -> dict[str, object]:
    """The arguments to add to these; also sets vLLM's switch in this process. ConfigError where it has no such mode."""
    if device != "cpu":
        _switch_on()
    return {"hf_overrides": {"head_dtype": "float32", **arguments.get("hf_overrides", {})}}


def _switch_on() -> None:
    """Enable batch-invariant kernels, which vLLM does when it is imported."""
    if torch.cuda.get_device_capability() < OLDEST_GPU:
        why = "on GPUs older than Hopper vLLM replaces matrix products of the whole process by ones without gradients"
        raise ConfigError(f"{KEY}: {why}; set {KEY}=false")
    if "vllm" in sys.modules and os.environ.get(SWITCH) != "1":
        raise ConfigError(f"{KEY}: vLLM was imported without it; start this process with {SWITCH}=1")
    os.environ[SWITCH] = "1"


@contextmanager
def restored_torch() -> Iterator[None]:
    """Start vLLM inside: it may autotune kernels, and torch.bmm is not replaced by its kernel without gradients."""
    product, enabled = torch.bmm, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.bmm = product
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
