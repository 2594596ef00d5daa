"""Qwen3-MoE: Qwen3's attention with a softmax router over many small experts; some layers may stay dense."""

from typing import Any

from rlsys.models.megatron.blocks import (
    ATTENTION,
    EXPERT,
    QK_NORM,
    ROUTER,
    SPARSE_NORM,
    attention_settings,
    expert_dims,
    expert_settings,
)
from rlsys.models.megatron.family import SPARSE_NEEDS, Family
from rlsys.types import HFConfig


def settings(hf_config: HFConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's transformer configuration."""
    experts = expert_settings(hf_config, expert_dims(hf_config), normalised=bool(hf_config.get("norm_topk_prob")))
    return {**attention_settings(hf_config), **experts, "qk_layernorm": True}


def is_sparse(hf_config: HFConfig, layer: int) -> bool:
    """Whether a layer has experts."""
    dense = hf_config.get("mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % (hf_config.get("decoder_sparse_step") or 1) == 0


FAMILY = Family(
    model_types=("qwen3_moe",),
    dims=expert_dims,
    settings=settings,
    needs=SPARSE_NEEDS,
    layer=(*ATTENTION, *QK_NORM),
    is_sparse=is_sparse,
    sparse=(SPARSE_NORM, ROUTER),
    expert=EXPERT,
)
