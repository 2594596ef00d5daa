"""Mistral: as Llama, with a sliding window in some of its models."""

from rlsys.models.megatron.family import Family

FAMILY = Family(model_types=("mistral",))
