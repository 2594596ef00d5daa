"""How Megatron-Core shards and computes a model: the sections actor.megatron, ref.megatron and critic.megatron."""

from importlib.metadata import distributions
from typing import Literal

from rlsys.config.schema import types as t
from rlsys.config.schema.base import Section, linked, open_dict
from rlsys.config.schema.model import AnyDType

HAS_FLASH_ATTENTION = any(any(distributions(name=name)) for name in ("flash-attn", "flash-attn-3"))
"""Whether flash-attn is installed, which is Transformer Engine's `attention_backend` flash."""


class MegatronShardConfig(Section):
    """How Megatron shards a model."""

    tensor_model_parallel_size: t.Count = 1
    """Ranks that each matrix is sharded over."""
    pipeline_model_parallel_size: t.Count = 1
    """Pipeline stages that the layers are split into."""
    virtual_pipeline_model_parallel_size: t.Count | None = None
    """Virtual stages per pipeline stage (interleaved schedule)."""
    context_parallel_size: t.Count = 1
    """Ranks that each sequence is split over."""
    expert_model_parallel_size: t.Count = 1
    """Ranks that the experts are distributed over."""
    expert_tensor_parallel_size: t.Count | None = None
    """Ranks that each expert's matrices are sharded over; null is tensor_model_parallel_size, or 1 where that does not
    divide the processes."""
    sequence_parallel: t.Flag = True
    """Split norms and residuals over the tensor-parallel ranks too."""
    dtype: AnyDType = "auto"
    """dtype of weights and computation; auto is bfloat16 (with float32 master weights) on CUDA, float32 on CPU."""
    full_determinism: t.Flag = False
    """Use bitwise reproducible CUDA kernels; this applies to the whole process."""
    override_transformer_config: t.OpenDict = open_dict()
    """More settings of Megatron's TransformerConfig, e.g. {recompute_granularity: selective}."""


class MegatronTrainConfig(MegatronShardConfig):
    """How Megatron shards and trains a model."""

    seed: t.Seed = 42
    """Seed of newly initialized weights (value heads, LoRA)."""


class MegatronRoleConfig(MegatronShardConfig):
    """How Megatron shards a model that shares its ranks with other roles."""

    param_offload: t.Flag = False
    """Offload parameters to host memory while another role runs."""
    full_determinism: t.Flag = linked("actor_rollout_ref.rollout.full_determinism")
    """Use bitwise reproducible CUDA kernels; this applies to the whole process."""


class MegatronConfig(MegatronRoleConfig, MegatronTrainConfig):
    """How Megatron shards and trains a model that shares its ranks with other roles."""

    grad_offload: t.Flag = False
    """Offload gradients to host memory while another role runs."""
    optimizer_offload: t.Flag = False
    """Offload optimizer state to host memory while another role runs."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Compute matrix products in this FP8 format of Transformer Engine."""
