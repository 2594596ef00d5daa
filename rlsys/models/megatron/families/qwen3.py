"""Qwen3, dense: as Llama, with norms on queries and keys and heads of a size of their own."""

from rlsys.models.megatron.blocks import ATTENTION, QK_NORM, attention_dims, attention_settings
from rlsys.models.megatron.family import Family

FAMILY = Family(
    model_types=("qwen3", "qwen3_vl_text"),
    dims=lambda hf_config: attention_dims({"head_dim": 128, **hf_config}),
    settings=lambda hf_config: {**attention_settings({"head_dim": 128, **hf_config}), "qk_layernorm": True},
    layer=(*ATTENTION, *QK_NORM),
)
