"""gpt-oss: biases everywhere, attention sinks, windows in every other layer, and a softmax router over experts with a
clamped activation, whose weights stay stacked as Hugging Face stores them."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import mixtral
from rlsys.models.megatron.rules import Rule, rows, whole, within
from rlsys.types import HFConfig

STACKS = (
    Rule("gate_up_proj", rows, ("gate_up_proj [experts, hidden, gate_up]",)),
    Rule("gate_up_proj_bias", rows, ("gate_up_proj_bias [experts, gate_up]",)),
    Rule("down_proj", rows, ("down_proj [experts, expert_ffn, hidden]",)),
    Rule("down_proj_bias", rows, ("down_proj_bias [experts, hidden]",)),
)


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
    layer=(
        *blocks.ATTENTION,
        blocks.QKV_BIAS,
        *blocks.attention(
            Rule("linear_proj.bias", whole, ("o_proj.bias [hidden]",)),
            Rule("core_attention.softmax_offset", rows, ("sinks [heads]",)),
        ),
    ),
    sparse=(
        blocks.SPARSE_NORM,
        Rule("mlp.router.weight", whole, ("mlp.router.weight [experts, hidden]",)),
        Rule("mlp.router.bias", whole, ("mlp.router.bias [experts]",)),
    ),
    expert=(),
    expert_stacks=within("mlp.experts", "mlp.experts", *STACKS),
)
