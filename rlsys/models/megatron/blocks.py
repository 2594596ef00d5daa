"""What families share: rules of attention and gated MLPs, and what config.json says of these and of experts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig
from rlsys.utils.errors import ConfigError

Settings = dict[str, Any]
"""Keyword arguments of a Megatron class."""
ATTENTION, GATED_MLP = rules_of("attention"), rules_of("mlp_norm", "mlp")
(QKV_BIAS,) = rules_of("qkv_bias")
SCALED_ROPE = ("llama3", "yarn")
"""Rotary scalings that are computed by transformers' functions."""
ONLY: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, 0.0, None),
    "quantization_config": (None,),
}


def first_of(hf_config: HFConfig, *keys: str) -> Any:
    """The value of the first key that is there and not None; ConfigError if there is none."""
    for key in keys:
        if hf_config.get(key) is not None:
            return hf_config[key]
    raise ConfigError(f"config.json has no {' or '.join(keys)}")


def attention_dims(hf_config: HFConfig) -> dict[str, int]:
    """The dimensions of a decoder with grouped-query attention and a gated MLP."""
    heads, hidden = hf_config["num_attention_heads"], hf_config["hidden_size"]
    groups = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hidden // heads
    return {
        "layers": hf_config["num_hidden_layers"],
        "vocab": hf_config["vocab_size"],
        "hidden": hidden,
        "ffn": hf_config["intermediate_size"],
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "q": heads * head_dim,
        "kv": groups * head_dim,
    }


def attention_settings(hf_config: HFConfig) -> Settings:
    """Megatron's settings of a decoder with RMSNorm, grouped-query attention and a gated MLP, without dropout."""
    dims = attention_dims(hf_config)
    return {
        "num_layers": dims["layers"],
        "hidden_size": dims["hidden"],
        "ffn_hidden_size": dims["ffn"],
        "num_attention_heads": dims["heads"],
        "num_query_groups": dims["groups"],
        "kv_channels": dims["head_dim"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "init_method_std": hf_config.get("initializer_range", 0.02),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mrope_section": rope_of(hf_config).get("mrope_section"),
        **windows(hf_config),
    }


def expert_dims(hf_config: HFConfig, *, expert_ffn: str = "moe_intermediate_size") -> dict[str, int]:
    """The dimensions of a decoder with experts, whose width is the key `expert_ffn` of config.json, shared ones and
    layers for multi-token prediction included."""
    return {
        **attention_dims(hf_config),
        "experts": first_of(hf_config, "num_experts", "n_routed_experts", "num_local_experts"),
        "expert_ffn": hf_config[expert_ffn],
        "shared_ffn": hf_config[expert_ffn] * (hf_config.get("n_shared_experts") or 0),
        "mtp_layers": hf_config.get("num_nextn_predict_layers") or hf_config.get("num_mtp_layers") or 0,
        "two_hidden": 2 * hf_config["hidden_size"],
        "gate_up": 2 * hf_config[expert_ffn],
    }


def expert_settings(hf_config: HFConfig, dims: Mapping[str, int], *, normalised: bool) -> Settings:
    """Megatron's settings of a mixture of experts with a softmax router and no loss on its balance.

    `normalised`: the weights of the chosen experts sum to one.
    """
    return {
        "num_moe_experts": dims["experts"],
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_ffn_hidden_size": dims["expert_ffn"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def rope_of(hf_config: HFConfig) -> Settings:
    """The rotary settings, "rope_theta" and "rope_type" among them, from `rope_parameters` or the older keys."""
    theta = hf_config.get("rope_theta") or 10000.0
    merged = {"rope_theta": theta, **(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    merged["rope_type"] = merged.get("rope_type") or merged.get("type") or "default"
    return merged


def rope_args(hf_config: HFConfig, *, scaled: Sequence[str] = SCALED_ROPE) -> Settings:
    """GPTModel's rotary arguments; ConfigError for a scaling that is not computed."""
    rope = rope_of(hf_config)
    kind = rope["rope_type"]
    args: Settings = {
        **({"position_embedding_type": "mrope"} if "mrope_section" in rope else {}),
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor") or 1.0,
    }
    if kind == "default" or (kind in scaled and args["rotary_percent"] == 1.0 and "mrope_section" not in rope):
        return args
    if kind == "linear":
        return {**args, "seq_len_interpolation_factor": float(rope["factor"])}
    known = ", ".join(["default", "linear", *(f"{name} of whole heads" for name in scaled)])
    raise ConfigError(f"Megatron does not compute this rotary scaling: {rope}; known are {known}; set strategy=fsdp")


def windows(hf_config: HFConfig) -> Settings:
    """Megatron's settings of the layers that attend to the last tokens only; empty where none does."""
    window = hf_config.get("sliding_window")
    if window is None or not hf_config.get("use_sliding_window", True):
        return {}
    types = hf_config.get("layer_types") or ["sliding_attention"] * hf_config["num_hidden_layers"]
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": [int(layer == "sliding_attention") for layer in types],
    }
