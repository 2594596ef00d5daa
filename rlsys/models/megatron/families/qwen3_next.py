"""Qwen3-Next: gated delta layers and every few layers gated attention, a softmax router over many small experts, and a
shared expert with a gate of its own. Its multi-token prediction layer is carried."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import qwen3_moe
from rlsys.models.megatron.family import SPARSE_NEEDS
from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig

SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
DELTA = tuple(f"linear_{size}" for size in SIZES)
"""Sizes of gated delta layers, which Megatron calls as config.json does."""


def delta_dims(hf_config: HFConfig) -> dict[str, int]:
    """The dimensions that families with gated delta layers have beside their MLPs'; `delta_each`: what one head of keys
    has of values."""
    own = blocks.attention_dims(hf_config)
    heads, values, head_k, head_v, conv = (hf_config[key] for key in DELTA)
    k, v, each = heads * head_k, values * head_v, values // heads
    own |= {"delta_heads": heads, "delta_head_k": head_k, "delta_k": k, "delta_qkv": 2 * k + v, "conv": conv}
    own |= {"delta_values": values, "delta_head_v": head_v, "delta_v": v, "delta_qkvz": 2 * (k + v)}
    own |= {"delta_each": each, "delta_each_v": each * head_v, "delta_ba": 2 * values, "gated_q": 2 * own["q"]}
    return own | {"mtp_layers": 1, "two_hidden": 2 * own["hidden"]}


def delta_settings(hf_config: HFConfig) -> blocks.Settings:
    """Megatron's settings of norms that count from one, of gated attention and of gated delta layers."""
    own = dict.fromkeys(("qk_layernorm", "layernorm_zero_centered_gamma", "attention_output_gate"), True)
    return own | {key: hf_config[key] for key in DELTA}


def dims(hf_config: HFConfig) -> dict[str, int]:
    """The model's dimensions by the names that the tables use."""
    shared = {"shared_ffn": hf_config["shared_expert_intermediate_size"]}
    return {**blocks.expert_dims(hf_config), **delta_dims(hf_config), **shared}


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    shared = {"moe_shared_expert_intermediate_size": dims(hf_config)["shared_ffn"], "moe_shared_expert_gate": True}
    return {**qwen3_moe.settings(hf_config), **delta_settings(hf_config), **shared}


def is_linear(hf_config: HFConfig, layer: int) -> bool:
    """Whether a layer has gated delta attention."""
    if types := hf_config.get("layer_types"):
        return types[layer] == "linear_attention"
    return (layer + 1) % (hf_config.get("full_attention_interval") or 4) != 0


FAMILY = replace(
    qwen3_moe.FAMILY,
    model_types=("qwen3_next",),
    dims=dims,
    settings=settings,
    rope=lambda hf_config: blocks.rope_args({"partial_rotary_factor": 0.25, **hf_config}),
    needs=(*SPARSE_NEEDS, *DELTA, "shared_expert_intermediate_size"),
    layer=rules_of("gated_attention", "qk_norm"),
    linear=rules_of("delta_norm", "qwen3_next_in_proj", "delta"),
    is_linear=is_linear,
    sparse=rules_of("sparse_norm", "router", "gated_shared_expert"),
    mtp=rules_of("qwen3_next_mtp"),
    mtp_prefix="mtp.",
)
