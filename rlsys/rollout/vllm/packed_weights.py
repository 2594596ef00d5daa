"""What vLLM makes of weights when it loads them, made again: its loader leaves some as it was, and a push all of it.

And what it drops of quantised ones when it has loaded them: how to load them again.
"""

from typing import Any

import torch
from torch import nn

from rlsys.models.quantized import FP8


def pack_again(model: Any) -> None:
    """Repeat the packing for a CPU's kernels of a tied output head and of experts, after all weights are loaded."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):  # a tied head loads nothing, so its packed copy would stay stale
        head.quant_method.process_weights_after_loading(head)
    for layer in model.modules():  # vLLM repacks experts only if they are loaded first
        experts: Any = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if experts is not None:
            experts.fused_experts.process_weights_after_loading(layer)


@torch.no_grad()
def derive_again(model: Any, dtype: torch.dtype) -> None:
    """Have attention layers derive again what they keep beside their weights, in place, where CUDA graphs read it.

    These are the matrices that latent attention absorbs, copies where `kv_b_proj` is quantized, and sinks in float32.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    for layer in model.modules():
        if isinstance(layer, AttentionLayerBase) and hasattr(layer, "process_weights_after_loading"):
            layer.process_weights_after_loading(dtype)


def keep_loadable(model: nn.Module) -> None:
    """Give the parameters of layers in FP8 the loaders back with which vLLM made them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    for layer in model.modules():
        held = dict(layer.named_parameters(recurse=False))
        is_float8 = FP8 in {parameter.dtype for parameter in held.values()}
        for name, made in get_layerwise_info(layer).restore_metadata[0].items() if is_float8 else ():
            held[name].__class__, held[name].__dict__ = type(made), made.__dict__.copy()
            restore_layer_refs(held[name], layer)
