"""Mixtral: Llama's attention, experts in every layer, weights of the chosen experts summing to one."""

from typing import Any

from rlsys.models.megatron.blocks import (
    ATTENTION,
    ONLY,
    SPARSE_NORM,
    HFConfig,
    attention_dims,
    attention_settings,
    expert_settings,
    first_of,
    rope_args,
    sliding,
)
from rlsys.models.megatron.family import NEEDS, Family
from rlsys.models.megatron.rules import Rule, columns, stacked, whole


def dims(hf_config: HFConfig) -> dict[str, int]:
    """The model's dimensions by the names that the tables use."""
    own = attention_dims(hf_config)
    experts = first_of(hf_config, "num_local_experts", "num_experts")
    return {**own, "experts": experts, "expert_ffn": own.pop("ffn")}


def settings(hf_config: HFConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's transformer configuration."""
    own = dims(hf_config)
    experts = expert_settings(hf_config, experts=own["experts"], expert_ffn=own["expert_ffn"], normalised=True)
    return {**attention_settings(hf_config), **experts}


FAMILY = Family(
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    dims=dims,
    settings=settings,
    rope=rope_args,
    needs=(*NEEDS, "num_experts_per_tok"),
    only={**ONLY, "router_jitter_noise": (0, 0.0, None)},
    refuse=sliding,
    layer=ATTENTION,
    dense=(),
    is_sparse=lambda hf_config, layer: True,
    sparse=(
        SPARSE_NORM,
        Rule("mlp.router.weight", whole, ("block_sparse_moe.gate.weight [experts, hidden]",)),
    ),
    expert=(
        Rule(
            "linear_fc1.weight",
            stacked,
            (
                "block_sparse_moe.experts.{e}.w1.weight [expert_ffn, hidden]",
                "block_sparse_moe.experts.{e}.w3.weight [expert_ffn, hidden]",
            ),
        ),
        Rule("linear_fc2.weight", columns, ("block_sparse_moe.experts.{e}.w2.weight [hidden, expert_ffn]",)),
    ),
)
