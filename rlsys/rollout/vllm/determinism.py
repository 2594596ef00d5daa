"""vLLM's log-probabilities as near the trainer's as it offers: a head in float32 and, on GPUs, batch invariance.

The head's logits are otherwise rounded to bfloat16, by up to 0.06 where they are above 16, which is most of what can be
taken away of the difference. Batch-invariant kernels give a token the same digits whatever it is batched with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlsys.rollout.vllm.version import VLLM
from rlsys.utils.errors import ConfigError

KEY = "actor_rollout_ref.rollout.full_determinism"
SWITCH = "VLLM_BATCH_INVARIANT"
OLDEST_GPU = (9, 0)


def aligned_arguments(arguments: Mapping[str, Any], *, device: str) -> dict[str, Any]:
    """Engine arguments to add to these, and vLLM's switch set in this process; ConfigError where it has none."""
    if not VLLM.chosen().aligns:
        raise ConfigError(f"{KEY}: vLLM {VLLM.installed()} is not known to have it; write {KEY}=false, or install 0.26")
    if device != "cpu":
        _switch_on()
    return {"hf_overrides": {"head_dtype": "float32", **arguments.get("hf_overrides", {})}}


def _switch_on() -> None:
    """Ask for batch-invariant kernels, which vLLM does as it is imported."""
    if torch.cuda.get_device_capability() < OLDEST_GPU:
        why = "on GPUs older than Hopper vLLM puts products without gradients under the whole process"
        raise ConfigError(f"{KEY}: {why}; write {KEY}=false")
    if "vllm" in sys.modules and os.environ.get(SWITCH) != "1":
        raise ConfigError(f"{KEY}: vLLM was imported without it; start this process with {SWITCH}=1")
    os.environ[SWITCH] = "1"


@contextmanager
def choose_kernels() -> Iterator[None]:
    """Let vLLM time kernels while it compiles, which the trainer's deterministic mode forbids in the whole process."""
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)


@contextmanager
def keep_gradients() -> Iterator[None]:
    """Keep torch.bmm, which vLLM replaces by a kernel without gradients; it puts the kernel behind torch.bmm, too."""
    product = torch.bmm
    try:
        yield
    finally:
        torch.bmm = product
