"""Qwen3-Next: gated delta layers and every few layers gated attention, a softmax router over many small experts, and a
shared expert with a gate of its own. Its multi-token prediction layer is carried."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import qwen3_moe
from rlsys.models.megatron.family import SPARSE_NEEDS
from rlsys.models.megatron.rules import Rule, columns, gated_grouped, regrouped, rows, whole, within
from rlsys.types import HFConfig

SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
DELTA = tuple(f"linear_{size}" for size in SIZES)
"""Sizes of gated delta layers, which Megatron calls as config.json does."""
NORM, QKV, OUT = blocks.ATTENTION
GATED_QKV = replace(QKV, shard_fn=gated_grouped, hf=("self_attn.q_proj.weight [gated_q, hidden]", *QKV.hf[1:]))


def delta_rules(in_proj: Rule) -> tuple[Rule, ...]:
    """The rules of a layer with gated delta attention, whose input projection families store in different tensors."""
    own = (
        in_proj,
        Rule("conv1d.weight", regrouped(("delta_k", "delta_k", "delta_v")), ("conv1d.weight [delta_qkv, 1, conv]",)),
        Rule("dt_bias", rows, ("dt_bias [delta_values]",)),
        Rule("A_log", rows, ("A_log [delta_values]",)),
        Rule("out_norm.weight", whole, ("norm.weight [delta_head_v]",)),
        Rule("out_proj.weight", columns, ("out_proj.weight [hidden, delta_v]",)),
    )
    return replace(NORM, te="self_attention.in_proj.layer_norm_weight"), *within("self_attention", "linear_attn", *own)


IN_PROJ = Rule(
    "in_proj.weight",
    regrouped(("delta_head_k", "delta_head_k", "delta_each_v", "delta_each_v"), ("delta_each", "delta_each")),
    ("in_proj_qkvz.weight [delta_qkvz, hidden]", "in_proj_ba.weight [delta_ba, hidden]"),
)
MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
MTP = ("fc.weight [hidden, two_hidden]", *(f"{name}.weight [hidden]" for name in MTP_NORMS))


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
    layer=(NORM, GATED_QKV, OUT, *blocks.QK_NORM),
    linear=delta_rules(IN_PROJ),
    is_linear=is_linear,
    sparse=(
        *qwen3_moe.FAMILY.sparse,
        *within("mlp.shared_experts", "mlp.shared_expert", *blocks.mlp_rules("shared_ffn")),
        Rule("mlp.shared_experts.gate_weight", whole, ("mlp.shared_expert_gate.weight [1, hidden]",)),
    ),
    mtp=MTP,
    mtp_prefix="mtp.",
)
