"""Llama 2 and 3, and dense models of their make: SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3."""

from rlsys.models.megatron.blocks import ONLY, attention_dims, attention_settings
from rlsys.models.megatron.family import Family
from rlsys.models.megatron.rules import rules_of

LLAMA = Family(model_types=("llama",), settings=lambda config: attention_settings({**config, "sliding_window": None}))
MISTRAL = Family(model_types=("mistral",))
"""With a sliding window in some of its models."""
QWEN2 = Family(
    model_types=("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
    settings=lambda hf_config: {**attention_settings(hf_config), "add_qkv_bias": True},
    only={key: values for key, values in ONLY.items() if key != "attention_bias"},
    layer=rules_of("attention", "qkv_bias"),
)
"""With a bias on queries, keys and values."""
QWEN3 = Family(
    model_types=("qwen3", "qwen3_vl_text"),
    dims=lambda hf_config: attention_dims({"head_dim": 128, **hf_config}),
    settings=lambda hf_config: {**attention_settings({"head_dim": 128, **hf_config}), "qk_layernorm": True},
    layer=rules_of("attention", "qk_norm"),
)
"""With norms on queries and keys, and heads of a size of their own."""
