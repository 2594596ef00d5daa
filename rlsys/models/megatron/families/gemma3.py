"""Gemma 3, its text models: norms whose weights count from one, before and after attention and MLP and on queries and
keys, a gated GELU, scaled embeddings, and windows with a rotary base of their own in most layers."""

from functools import partial

from rlsys.models.megatron.blocks import ONLY, Settings, attention_settings, rope_args
from rlsys.models.megatron.family import Family
from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig


def settings(hf_config: HFConfig) -> Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    from torch.nn import functional as F  # the planner reads this table without torch

    return {
        **attention_settings(hf_config),
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "activation_func": partial(F.gelu, approximate="tanh"),
        "softmax_scale": hf_config.get("query_pre_attn_scalar", 256) ** -0.5,
    }


def layer_rope(hf_config: HFConfig, layer_type: str) -> Settings:
    """Megatron's rotary arguments of the layers of one type."""
    own = (hf_config.get("rope_parameters") or {}).get(layer_type)
    return rope_args({**hf_config, "rope_parameters": own}, scaled=())


FAMILY = Family(
    model_types=("gemma3_text",),
    settings=settings,
    rope=lambda hf_config: layer_rope(hf_config, "full_attention"),
    window_rope=lambda hf_config: layer_rope(hf_config, "sliding_attention"),
    only={
        **{key: ONLY[key] for key in ("attention_bias", "attention_dropout", "quantization_config")},
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (False, None),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    },
    layer=rules_of("attention", "qk_norm", "gemma3_norms"),
    dense=rules_of("mlp"),
    post_norms=True,
    scaled_embedding=True,
)
