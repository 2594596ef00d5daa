"""Qwen3.5: Qwen3-Next's layers with input projections stored apart, dense or with experts."""

from dataclasses import replace

from rlsys.models.megatron import blocks
from rlsys.models.megatron.families import qwen3_next
from rlsys.models.megatron.family import NEEDS
from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig


def sparse_config(hf_config: HFConfig) -> HFConfig:
    """What config.json says of a model with experts, and what Qwen3-Next's says besides."""
    return {**hf_config, "intermediate_size": hf_config["moe_intermediate_size"], "norm_topk_prob": True}


FAMILY = replace(
    qwen3_next.FAMILY,
    model_types=("qwen3_5_text",),
    dims=qwen3_next.delta_dims,
    settings=lambda hf_config: {**blocks.attention_settings(hf_config), **qwen3_next.delta_settings(hf_config)},
    needs=(*NEEDS, *qwen3_next.DELTA),
    linear=rules_of("delta_norm", "qwen3_5_in_proj", "delta"),
    is_sparse=lambda hf_config, layer: False,
    sparse=(),
    expert=(),
)
SPARSE = replace(
    qwen3_next.FAMILY,
    model_types=("qwen3_5_moe_text",),
    dims=lambda hf_config: qwen3_next.dims(sparse_config(hf_config)),
    settings=lambda hf_config: qwen3_next.settings(sparse_config(hf_config)),
    needs=tuple(key for key in qwen3_next.FAMILY.needs if key != "intermediate_size"),
    linear=FAMILY.linear,
)
