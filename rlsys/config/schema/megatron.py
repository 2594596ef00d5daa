"""How Megatron-Core cuts and computes a model: the sections actor.megatron, ref.megatron and critic.megatron."""

from __future__ import annotations

from typing import Literal

from rlsys.config.schema.base import Count, Flag, OpenDict, Section, Seed, linked, open_dict
from rlsys.config.schema.model import AnyDType

_ACTOR = "actor_rollout_ref.actor.megatron"


class MegatronRoleConfig(Section):
    """How Megatron cuts a model."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: Count = 1
    """Stages the layers are split into."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Pieces of each stage, which take turns (interleaved schedule)."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: Count = 1
    """Ranks the experts are spread over."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that share each expert's matrices; null as tensor_model_parallel_size."""
    sequence_parallel: Flag = True
    """Share norms and residuals among the ranks of tensor parallelism too."""
    param_offload: Flag = False
    """Keep parameters in host memory while another role runs."""
    dtype: AnyDType = "auto"
    """Type of weights and computation; auto is bfloat16 (with float32 masters) on CUDA and float32 on CPU."""
    full_determinism: Flag = linked("actor_rollout_ref.rollout.full_determinism")
    """Take kernels on CUDA that repeat bit for bit; it holds for all that the process computes."""
    override_transformer_config: OpenDict = open_dict()
    """Further settings of Megatron's TransformerConfig, e.g. {recompute_granularity: selective}."""


class MegatronConfig(MegatronRoleConfig):
    """How Megatron cuts and trains a model."""

    grad_offload: Flag = False
    """Keep gradients in host memory while another role runs."""
    optimizer_offload: Flag = False
    """Keep optimizer state in host memory while another role runs."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Matrix products in FP8 of this Transformer Engine format."""
    seed: Seed = 42
    """Seed of weights that are made anew (value heads, LoRA)."""


class RefMegatronConfig(MegatronRoleConfig):
    """How Megatron cuts the reference."""

    tensor_model_parallel_size: Count = linked(f"{_ACTOR}.tensor_model_parallel_size")
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: Count = linked(f"{_ACTOR}.pipeline_model_parallel_size")
    """Stages the layers are split into."""
    virtual_pipeline_model_parallel_size: Count | None = linked(f"{_ACTOR}.virtual_pipeline_model_parallel_size")
    """Pieces of each stage, which take turns (interleaved schedule)."""
    context_parallel_size: Count = linked(f"{_ACTOR}.context_parallel_size")
    """Ranks that share each sequence."""
    expert_model_parallel_size: Count = linked(f"{_ACTOR}.expert_model_parallel_size")
    """Ranks the experts are spread over."""
    expert_tensor_parallel_size: Count | None = linked(f"{_ACTOR}.expert_tensor_parallel_size")
    """Ranks that share each expert's matrices; null as tensor_model_parallel_size."""
    sequence_parallel: Flag = linked(f"{_ACTOR}.sequence_parallel")
    """Share norms and residuals among the ranks of tensor parallelism too."""
    param_offload: Flag = linked(f"{_ACTOR}.param_offload")
    """Keep parameters in host memory while another role runs."""
    dtype: AnyDType = linked(f"{_ACTOR}.dtype")
    """Type of weights and computation."""
    full_determinism: Flag = linked(f"{_ACTOR}.full_determinism")
    """Take kernels on CUDA that repeat bit for bit."""
    override_transformer_config: OpenDict = linked(f"{_ACTOR}.override_transformer_config")
    """Further settings of Megatron's TransformerConfig."""
