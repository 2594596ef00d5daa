"""Llama 2 and 3, and models of their make such as SmolLM2."""

from rlsys.models.megatron.blocks import attention_settings
from rlsys.models.megatron.family import Family

FAMILY = Family(
    model_types=("llama",),
    settings=lambda hf_config: attention_settings({**hf_config, "sliding_window": None}),
)
