"""GLM-4.5 and GLM-4.6: grouped-query attention with biases, partly rotated, and DeepSeek-V3's experts; the large model
has norms on queries and keys. Multi-token prediction layers are carried."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import deepseek_v3
from rlsys.models.megatron.family import SPARSE_NEEDS
from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig


def dims(hf_config: HFConfig) -> dict[str, int]:
    """The model's dimensions by the names that the tables use."""
    has = {"qkv_bias": hf_config.get("attention_bias"), "qk_norm": hf_config.get("use_qk_norm")}
    return {**blocks.expert_dims(hf_config), **{name: int(bool(value)) for name, value in has.items()}}


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    own = dims(hf_config)
    attention = {"add_qkv_bias": bool(own["qkv_bias"]), "qk_layernorm": bool(own["qk_norm"])}
    return {**blocks.attention_settings(hf_config), **deepseek_v3.sparse_settings(hf_config, own), **attention}


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_types=("glm4_moe",),
    dims=dims,
    settings=settings,
    rope=lambda hf_config: blocks.rope_args({"partial_rotary_factor": 0.5, **hf_config}),
    needs=SPARSE_NEEDS,
    only={**blocks.ONLY, "attention_bias": (True, False, None), "norm_topk_prob": (True,)},
    layer=rules_of("attention", "qkv_bias_of_some", "qk_norm_of_some"),
    mla=False,
)
