"""Qwen3.5, its dense text models: Qwen3-Next's layers with a gated MLP, and input projections stored apart."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import qwen3_next
from rlsys.models.megatron.family import NEEDS
from rlsys.models.megatron.rules import Rule, regrouped
from rlsys.types import HFConfig

IN_PROJ = Rule(
    "in_proj.weight",
    regrouped(("delta_k", "delta_k", "delta_v"), ("delta_v",), ("delta_values",), ("delta_values",)),
    (
        "in_proj_qkv.weight [delta_qkv, hidden]",
        "in_proj_z.weight [delta_v, hidden]",
        "in_proj_b.weight [delta_values, hidden]",
        "in_proj_a.weight [delta_values, hidden]",
    ),
)


def dims(hf_config: HFConfig) -> dict[str, int]:
    """The model's dimensions by the names that the tables use."""
    own = {**blocks.attention_dims(hf_config), **qwen3_next.delta_dims(hf_config)}
    return {**own, "two_hidden": 2 * own["hidden"]}


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    return {**blocks.attention_settings(hf_config), **qwen3_next.delta_settings(dims(hf_config))}


FAMILY = replace(
    qwen3_next.FAMILY,
    model_types=("qwen3_5_text",),
    dims=dims,
    settings=settings,
    needs=(*NEEDS, *qwen3_next.DELTA_NEEDS),
    linear=qwen3_next.delta_rules(IN_PROJ),
    is_sparse=lambda hf_config, layer: False,
    sparse=(),
    expert=(),
)
