"""DeepSeek-V3: latent attention with or without low-rank queries, first layers dense, then shared and routed experts
chosen by sigmoid scores plus a bias, within the best groups of experts. Multi-token prediction layers are carried."""

from rlsys.models.megatron import blocks
from rlsys.models.megatron.family import SPARSE_NEEDS, Family
from rlsys.models.megatron.rules import Dims, rules_of
from rlsys.types import HFConfig
from rlsys.utils.errors import ConfigError


def dims(hf_config: HFConfig) -> dict[str, int]:
    """The model's dimensions by the names that the tables use."""
    heads, q_lora = hf_config["num_attention_heads"], hf_config.get("q_lora_rank") or 0
    nope, rope, v = (hf_config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return {
        **blocks.expert_dims(hf_config),
        "groups": heads,
        "full_q": 0 if q_lora else 1,
        "q_lora": q_lora,
        "kv_lora": hf_config["kv_lora_rank"],
        "kv_lora_rope": hf_config["kv_lora_rank"] + rope,
        "q": heads * (nope + rope),
        "kv": heads * (nope + v),
        "v": heads * v,
    }


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    return {
        **blocks.attention_settings({**hf_config, "num_key_value_heads": None, "head_dim": hf_config["v_head_dim"]}),
        **sparse_settings(hf_config, dims(hf_config)),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": hf_config.get("q_lora_rank"),
        "kv_lora_rank": hf_config["kv_lora_rank"],
        "qk_head_dim": hf_config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf_config["qk_rope_head_dim"],
        "v_head_dim": hf_config["v_head_dim"],
        **rope_settings(hf_config),
    }


def sparse_settings(hf_config: HFConfig, own: Dims) -> blocks.Settings:
    """Megatron's settings of shared experts, and of experts chosen by sigmoid scores plus a bias within groups."""
    groups = {"moe_router_num_groups": hf_config.get("n_group"), "moe_router_group_topk": hf_config.get("topk_group")}
    return {
        **blocks.expert_settings(hf_config, own, normalised=True),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": hf_config.get("routed_scaling_factor") or 1.0,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": own["shared_ffn"] or None,
        **(groups if grouped_routing(hf_config) else {}),
    }


def grouped_routing(hf_config: HFConfig) -> bool:
    """Whether some groups of experts are out of a token's reach."""
    groups = hf_config.get("n_group") or 1
    return groups > 1 and (hf_config.get("topk_group") or groups) < groups


def rope_settings(hf_config: HFConfig) -> blocks.Settings:
    """The rotary part of MLATransformerConfig; ConfigError for a scaling that Megatron computes otherwise."""
    rope = blocks.rope_of(hf_config)
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"], "rotary_scaling_factor": 1.0}
    mscale, all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    known = rope["rope_type"] == "yarn" and rope.get("attention_factor") is None and rope.get("truncate", True)
    if not known or (all_dim and not mscale):
        raise ConfigError(f"Megatron does not compute this rotary scaling: {rope}; known are default and plain yarn")
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": blocks.first_of(
            {**hf_config, **rope}, "original_max_position_embeddings", "max_position_embeddings"
        ),
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": mscale if all_dim else 1.0,
        "mscale_all_dim": all_dim,
    }


def refuse(hf_config: HFConfig) -> str:
    """What Megatron's router would do otherwise than transformers'."""
    if grouped_routing(hf_config) and hf_config["num_experts_per_tok"] // (hf_config.get("topk_group") or 1) != 2:
        return "num_experts_per_tok is not 2 x topk_group (Megatron rates a group by that many experts, HF by two)"
    return ""


FAMILY = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    dims=dims,
    settings=settings,
    rope=lambda hf_config: {"rotary_base": blocks.rope_of(hf_config)["rope_theta"]},
    needs=(*SPARSE_NEEDS, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    only={
        **blocks.ONLY,
        "norm_topk_prob": (True,),
        "rope_interleave": (True, None),
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    refuse=refuse,
    layer=rules_of("mla"),
    is_sparse=lambda hf_config, layer: layer >= (hf_config.get("first_k_dense_replace") or 0),
    sparse=rules_of("sparse_norm", "router", "router_bias", "shared_experts"),
    expert=rules_of("expert"),
    mtp=rules_of("deepseek_mtp"),
    mla=True,
)
