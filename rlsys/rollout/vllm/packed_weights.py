"""What vLLM's loader leaves as it was when weights are loaded again."""

from __future__ import annotations

from typing import Any


def pack_again(model: Any) -> None:
    """Repeat the packing for a CPU's kernels of a tied output head and of experts, after all weights are loaded."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):  # a tied head loads nothing, so its packed copy would stay stale
        head.quant_method.process_weights_after_loading(head)
    for layer in model.modules():  # vLLM repacks experts only if they are loaded first
        experts: Any = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if experts is not None:
            experts.fused_experts.process_weights_after_loading(layer)
