"""Mixtral: Llama's attention, experts in every layer, weights of the chosen experts summing to one."""

from rlsys.models.megatron import blocks
from rlsys.models.megatron.family import NEEDS, Family
from rlsys.models.megatron.rules import rules_of
from rlsys.types import HFConfig


def dims(hf_config: HFConfig) -> dict[str, int]:
    """The model's dimensions by the names that the tables use; no layer has a dense MLP."""
    dense_too = blocks.expert_dims(hf_config, expert_ffn="intermediate_size")
    return {name: size for name, size in dense_too.items() if name != "ffn"}


def settings(hf_config: HFConfig) -> blocks.Settings:
    """Keyword arguments of Megatron's transformer configuration."""
    return blocks.attention_settings(hf_config) | blocks.expert_settings(hf_config, dims(hf_config), normalised=True)


FAMILY = Family(
    model_types=("mixtral",),
    dims=dims,
    settings=settings,
    needs=(*NEEDS, "num_experts_per_tok"),
    only={**blocks.ONLY, "router_jitter_noise": (0, 0.0, None)},
    dense=(),
    is_sparse=lambda hf_config, layer: True,
    sparse=rules_of("sparse_norm", "mixtral_router"),
    expert=rules_of("mixtral_expert"),
)
