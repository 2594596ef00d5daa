"""Llama 2 and 3, and models of their make such as SmolLM2."""

from rlsys.models.megatron.family import Family

FAMILY = Family(model_types=("llama",), refuse=lambda hf_config: "")
