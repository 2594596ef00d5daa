"""Llama 2 and 3, and models of their make such as SmolLM2."""

from rlsys.models.megatron.blocks import ATTENTION, GATED_MLP, ONLY, attention_dims, attention_settings, rope_args
from rlsys.models.megatron.family import Family

FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    dims=attention_dims,
    settings=attention_settings,
    rope=rope_args,
    only=ONLY,
    layer=ATTENTION,
    dense=GATED_MLP,
)
