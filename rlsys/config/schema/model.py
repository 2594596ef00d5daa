"""Models, optimizers, shards and checkpoints: the sections every trained role has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from rlsys.config.schema.base import (
    Betas,
    Coefficient,
    Count,
    CountOrOff,
    CountOrZero,
    DType,
    Flag,
    Fraction,
    LocalPath,
    OpenDict,
    Section,
    Seed,
    Text,
    Texts,
    linked,
    open_dict,
)

_DTYPE_NAMES = {
    "fp32": "float32",
    "float": "float32",
    "torch.float32": "float32",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "torch.float16": "float16",
}


def _dtype(value: object) -> object:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


AnyDType = Annotated[DType, BeforeValidator(_dtype)]
MasterDType = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_dtype)]
Scheduler = Literal["constant", "cosine", "linear"]
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
CheckpointParts = Annotated[
    tuple[CheckpointPart, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]


class ModelConfig(Section):
    """Which model, and how it is read and wrapped."""

    path: LocalPath | None = None
    """Folder of a Hugging Face model (config.json, safetensors, tokenizer); null takes the small start model."""
    tokenizer_path: LocalPath | None = None
    """Folder of the tokenizer where it is not the model's own."""
    trust_remote_code: Flag = False
    """Let the model's own Python files run."""
    custom_chat_template: Text | None = None
    """A Jinja chat template instead of the tokenizer's."""
    external_lib: Text | None = None
    """Python module every process imports first, e.g. one that registers estimators, losses or models."""
    override_config: OpenDict = open_dict()
    """Values written over the model's config.json, e.g. {attention_dropout: 0}."""
    enable_gradient_checkpointing: Flag = True
    """Recompute activations in the backward pass instead of keeping them."""
    use_remove_padding: Flag = True
    """Pack sequences without padding in training and in log-prob passes."""
    lora_rank: CountOrZero = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: Count = 16
    """LoRA scale; the adapters' output is multiplied by lora_alpha / lora_rank."""
    target_modules: Texts = ("all-linear",)
    """Modules that get adapters: names, or all-linear (on Megatron experts too)."""
    lora_adapter_path: LocalPath | None = None
    """Folder of a trained adapter to start from."""


class CriticModelConfig(ModelConfig):
    """The critic's model: the actor's unless said otherwise, with a head that gives one value."""

    path: LocalPath | None = linked("actor_rollout_ref.model.path")
    """Folder of the critic's base model."""
    tokenizer_path: LocalPath | None = linked("actor_rollout_ref.model.tokenizer_path")
    """Folder of the tokenizer where it is not the model's own; it must be the actor's."""
    trust_remote_code: Flag = linked("actor_rollout_ref.model.trust_remote_code")
    """Let the model's own Python files run."""
    custom_chat_template: Text | None = linked("actor_rollout_ref.model.custom_chat_template")
    """A Jinja chat template instead of the tokenizer's."""
    external_lib: Text | None = linked("actor_rollout_ref.model.external_lib")
    """Python module every process imports first."""
    enable_gradient_checkpointing: Flag = linked("actor_rollout_ref.model.enable_gradient_checkpointing")
    """Recompute activations in the backward pass instead of keeping them."""
    use_remove_padding: Flag = linked("actor_rollout_ref.model.use_remove_padding")
    """Pack sequences without padding."""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Strict(), Field(ge=0, le=10)] = 1e-6
    """Peak learning rate."""
    weight_decay: Coefficient = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """AdamW's two decay rates."""
    lr_warmup_steps: CountOrOff = -1
    """Optimizer steps of linear warm-up; -1 leaves it to lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a part of all optimizer steps, where lr_warmup_steps is -1."""
    lr_scheduler_type: Scheduler = "constant"
    """Shape after the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Lowest learning rate of cosine and linear, as a part of lr."""


class CriticOptimConfig(OptimConfig):
    """AdamW for the critic."""

    lr: Annotated[float, Strict(), Field(ge=0, le=10)] = 1e-5
    """Peak learning rate."""


class ShardConfig(Section):
    """How FSDP2 shards a model."""

    fsdp_size: CountOrOff = -1
    """Ranks that share one copy of the model; -1 shares it over all, fewer gives copies (HSDP)."""
    offload_policy: Flag = False
    """Let FSDP2 keep parameters and optimizer in host memory always (slower, least device memory)."""
    reshard_after_forward: Flag = True
    """Free gathered parameters after each layer's forward pass."""
    forward_prefetch: Flag = False
    """Gather the next layer's parameters while one runs forward."""
    model_dtype: MasterDType = "float32"
    """Type the weights are held in."""
    dtype: AnyDType = "auto"
    """Type of the computation; auto is bfloat16 on CUDA and float32 on CPU."""
    seed: Seed = 42
    """Seed of weights that are made anew (value heads, LoRA)."""
    full_determinism: Flag = False
    """Take kernels on CUDA that repeat bit for bit; it holds for all that the process computes."""


class RoleShardConfig(ShardConfig):
    """How FSDP2 shards a model that takes turns with others on its ranks."""

    param_offload: Flag = False
    """Keep parameters in host memory while another role runs."""


class FSDPConfig(RoleShardConfig):
    """How FSDP2 shards a trained model that takes turns."""

    optimizer_offload: Flag = False
    """Keep optimizer state in host memory between updates."""
    full_determinism: Flag = linked("actor_rollout_ref.rollout.full_determinism")
    """Take kernels on CUDA that repeat bit for bit; it holds for all that the process computes."""


class RefShardConfig(RoleShardConfig):
    """How FSDP2 shards the reference."""

    fsdp_size: CountOrOff = linked("actor_rollout_ref.actor.fsdp_config.fsdp_size")
    """Ranks that share one copy of the model; -1 shares it over all."""
    reshard_after_forward: Flag = linked("actor_rollout_ref.actor.fsdp_config.reshard_after_forward")
    """Free gathered parameters after each layer's forward pass."""
    forward_prefetch: Flag = linked("actor_rollout_ref.actor.fsdp_config.forward_prefetch")
    """Gather the next layer's parameters while one runs forward."""
    model_dtype: MasterDType = linked("actor_rollout_ref.actor.fsdp_config.model_dtype")
    """Type the weights are held in."""
    dtype: AnyDType = linked("actor_rollout_ref.actor.fsdp_config.dtype")
    """Type of the computation."""
    full_determinism: Flag = linked("actor_rollout_ref.actor.fsdp_config.full_determinism")
    """Take kernels on CUDA that repeat bit for bit."""


class CheckpointConfig(Section):
    """What a checkpoint holds."""

    save_contents: CheckpointParts = ("model", "optimizer", "extra")
    """Parts to save; hf_model adds a Hugging Face folder that any other tool reads."""
    load_contents: CheckpointParts = linked(".save_contents")
    """Parts to take from a checkpoint on resume."""
