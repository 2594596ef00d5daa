"""Qwen3-MoE: Qwen3's attention with a softmax router over many small experts; some layers may stay dense."""

from rlsys.models.megatron import blocks
from rlsys.models.megatron.family import SPARSE_NEEDS, Family
from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    normalised = bool(hf_config.get("norm_topk_prob"))
    experts = blocks.expert_settings(hf_config, blocks.expert_dims(hf_config), normalised=normalised)
    return {**blocks.attention_settings(hf_config), **experts, "qk_layernorm": True}


def is_sparse(hf_config: HFConfig, layer: int) -> bool:
    """Whether a layer has experts."""
    dense = hf_config.get("mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % (hf_config.get("decoder_sparse_step") or 1) == 0


FAMILY = Family(
    model_types=("qwen3_moe",),
    dims=blocks.expert_dims,
    settings=settings,
    needs=SPARSE_NEEDS,
    layer=rules_of("attention", "qk_norm"),
    is_sparse=is_sparse,
    sparse=rules_of("sparse_norm", "router"),
    expert=rules_of("expert"),
)
