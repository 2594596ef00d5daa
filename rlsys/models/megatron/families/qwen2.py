"""Qwen2 and Qwen2.5, dense: as Llama, with a bias on queries, keys and values."""

from rlsys.models.megatron.blocks import ATTENTION, ONLY, QKV_BIAS, attention_settings
from rlsys.models.megatron.family import Family

FAMILY = Family(
    model_types=("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
    settings=lambda hf_config: {**attention_settings(hf_config), "add_qkv_bias": True},
    only={key: values for key, values in ONLY.items() if key != "attention_bias"},
    layer=(*ATTENTION, QKV_BIAS),
)
