"""Qwen2 and Qwen2.5, dense: as Llama, with a bias on queries, keys and values."""

from rlsys.models.megatron.blocks import (
    ATTENTION,
    GATED_MLP,
    ONLY,
    QKV_BIAS,
    attention_dims,
    attention_settings,
    rope_args,
    sliding,
)
from rlsys.models.megatron.family import Family

FAMILY = Family(
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    dims=attention_dims,
    settings=lambda hf_config: {**attention_settings(hf_config), "add_qkv_bias": True},
    rope=rope_args,
    only={key: values for key, values in ONLY.items() if key != "attention_bias"},
    refuse=sliding,
    layer=(*ATTENTION, QKV_BIAS),
    dense=GATED_MLP,
)
