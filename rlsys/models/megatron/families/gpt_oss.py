"""gpt-oss: biases everywhere, attention sinks, windows in every other layer, and a softmax router over experts with a
clamped activation, whose weights stay stacked as Hugging Face stores them."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import mixtral
from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    limit = hf_config.get("swiglu_limit", 7.0)
    own = {"add_bias_linear": True, "softmax_type": "learnable", "activation_func_clamp_value": limit}
    return mixtral.settings(hf_config) | own


FAMILY = replace(
    mixtral.FAMILY,
    model_types=("gpt_oss",),
    settings=settings,
    only={**blocks.ONLY, "attention_bias": (True,), "swiglu_alpha": (1.702,)},
    layer=rules_of("attention", "qkv_bias", "gpt_oss_attention"),
    sparse=rules_of("sparse_norm", "gpt_oss_router"),
    expert=(),
    expert_stacks=rules_of("gpt_oss_stacks"),
)
