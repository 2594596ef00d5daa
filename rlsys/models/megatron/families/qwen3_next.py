"""Qwen3-Next: gated delta layers and every few layers gated attention, a softmax router over many small experts, and a
shared expert with a gate of its own. Its multi-token prediction layer is carried."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import qwen3_moe
from rlsys.models.megatron.families.deepseek_v3 import SHARED_EXPERTS
from rlsys.models.megatron.family import SPARSE_NEEDS
from rlsys.models.megatron.rules import Dims, Rule, columns, gated_grouped, regrouped, rows, whole, within
from rlsys.types import HFConfig

DELTA_NEEDS = tuple(f"linear_{key}" for key in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads"))
GATED_ATTENTION = (
    blocks.ATTENTION[0],
    replace(
        blocks.ATTENTION[1],
        shard_fn=gated_grouped,
        hf=("self_attn.q_proj.weight [gated_q, hidden]", *blocks.ATTENTION[1].hf[1:]),
    ),
    *blocks.ATTENTION[2:],
    *blocks.QK_NORM,
)


def delta_rules(in_proj: Rule) -> tuple[Rule, ...]:
    """The rules of a layer with gated delta attention, whose input projection families store in different tensors."""
    return (
        replace(blocks.INPUT_NORM, te="self_attention.in_proj.layer_norm_weight"),
        *within(
            "self_attention",
            "linear_attn",
            in_proj,
            Rule("conv1d.weight", regrouped(("delta_k", "delta_k", "delta_v")), ("conv1d.weight [delta_qkv, 1, conv]",)),
            Rule("dt_bias", rows, ("dt_bias [delta_values]",)),
            Rule("A_log", rows, ("A_log [delta_values]",)),
            Rule("out_norm.weight", whole, ("norm.weight [delta_head_v]",)),
            Rule("out_proj.weight", columns, ("out_proj.weight [hidden, delta_v]",)),
        ),
    )


IN_PROJ = Rule(
    "in_proj.weight",
    regrouped(("delta_head_k", "delta_head_k", "delta_each_v", "delta_each_v"), ("delta_each", "delta_each")),
    ("in_proj_qkvz.weight [delta_qkvz, hidden]", "in_proj_ba.weight [delta_ba, hidden]"),
)
MTP = (
    Rule("fc", whole, ("fc.weight [hidden, two_hidden]",)),
    *(Rule(x, whole, (f"{x}.weight [hidden]",)) for x in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
)


def delta_dims(hf_config: HFConfig) -> dict[str, int]:
    """The dimensions of gated delta layers and of gated attention; `delta_each`: value heads of a key head."""
    heads, values = hf_config["linear_num_key_heads"], hf_config["linear_num_value_heads"]
    head_k, head_v = hf_config["linear_key_head_dim"], hf_config["linear_value_head_dim"]
    k, v = heads * head_k, values * head_v
    return {
        "delta_heads": heads,
        "delta_values": values,
        "delta_head_k": head_k,
        "delta_head_v": head_v,
        "delta_each": values // heads,
        "delta_each_v": v // heads,
        "delta_k": k,
        "delta_v": v,
        "delta_qkv": 2 * k + v,
        "delta_qkvz": 2 * k + 2 * v,
        "delta_ba": 2 * values,
        "conv": hf_config["linear_conv_kernel_dim"],
        "gated_q": 2 * blocks.attention_dims(hf_config)["q"],
        "mtp_layers": 1,
    }


def delta_settings(own: Dims) -> blocks.Settings:
    """Megatron's settings of norms that count from one, of gated attention and of gated delta layers."""
    return {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "linear_conv_kernel_dim": own["conv"],
        "linear_key_head_dim": own["delta_head_k"],
        "linear_value_head_dim": own["delta_head_v"],
        "linear_num_key_heads": own["delta_heads"],
        "linear_num_value_heads": own["delta_values"],
    }


def dims(hf_config: HFConfig) -> dict[str, int]:
    """The model's dimensions by the names that the tables use."""
    shared = {"shared_ffn": hf_config["shared_expert_intermediate_size"]}
    return {**blocks.expert_dims(hf_config), **delta_dims(hf_config), **shared}


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    own = dims(hf_config)
    shared = {"moe_shared_expert_intermediate_size": own["shared_ffn"], "moe_shared_expert_gate": True}
    return {**qwen3_moe.settings(hf_config), **delta_settings(own), **shared}


def is_linear(hf_config: HFConfig, layer: int) -> bool:
    """Whether a layer has gated delta attention."""
    if types := hf_config.get("layer_types"):
        return types[layer] == "linear_attention"
    return (layer + 1) % (hf_config.get("full_attention_interval") or 4) != 0


def refuse(hf_config: HFConfig) -> str:
    """What a head of queries and keys cannot have."""
    heads, values = hf_config["linear_num_key_heads"], hf_config["linear_num_value_heads"]
    return f"linear_num_value_heads={values} is no multiple of linear_num_key_heads={heads}" if values % heads else ""


SHARED_EXPERT = (
    *(replace(rule, hf=tuple(x.replace("shared_experts", "shared_expert") for x in rule.hf)) for rule in SHARED_EXPERTS),
    Rule("mlp.shared_experts.gate_weight", whole, ("mlp.shared_expert_gate.weight [1, hidden]",)),
)
FAMILY = replace(
    qwen3_moe.FAMILY,
    model_types=("qwen3_next",),
    dims=dims,
    settings=settings,
    rope=lambda hf_config: blocks.rope_args({"partial_rotary_factor": 0.25, **hf_config}),
    needs=(*SPARSE_NEEDS, *DELTA_NEEDS, "linear_num_value_heads", "shared_expert_intermediate_size"),
    refuse=refuse,
    layer=GATED_ATTENTION,
    linear=delta_rules(IN_PROJ),
    is_linear=is_linear,
    sparse=(*qwen3_moe.FAMILY.sparse, *SHARED_EXPERT),
    mtp=MTP,
    mtp_prefix="mtp.",
)
