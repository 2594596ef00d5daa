"""Models, optimizers, sharding and checkpoints: the sections of every trained role."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from rlsys.config.schema import types as t
from rlsys.config.schema.base import Section, linked, open_dict, section

_SHORT_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def _dtype(value: object) -> object:
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    return _SHORT_DTYPES.get(name, name) if isinstance(name, str) else name


AnyDType = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_dtype)]
Scheduler = Literal["constant", "cosine", "linear"]
CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
CheckpointParts = Annotated[tuple[CheckpointPart, ...], BeforeValidator(t.as_tuple)]


class ModelFolderConfig(Section):
    """A model and the code that comes with it."""

    path: t.LocalPath | None = None
    """Hugging Face model: a folder, org/name[@revision] of the hub, or a run or checkpoint; null is the start model."""
    trust_remote_code: t.Flag = False
    """Allow Python code in the model folder to run."""
    external_lib: t.Text | None = None
    """Module or .py file that every process imports first, e.g. to register estimators, losses or models."""


class ServedModelConfig(ModelFolderConfig):
    """A model that answers prompts, and its tokenizer."""

    tokenizer_path: t.LocalPath | None = None
    """Folder or hub id of the tokenizer, if it is not the model's."""
    custom_chat_template: t.Template | None = None
    """A Jinja chat template instead of the tokenizer's, also in checkpoints and exports."""


class ModelConfig(ModelFolderConfig):
    """A model, and how it is loaded and wrapped for training."""

    override_config: t.OpenDict = open_dict()
    """Values that replace those of config.json, e.g. {attention_dropout: 0}."""
    enable_gradient_checkpointing: t.Flag = True
    """Recompute activations in the backward pass instead of storing them; not set, or auto, a job on GPUs does so only
    where its memory plan needs it."""
    use_remove_padding: t.Flag = True
    """Pack sequences without padding in training and in log-prob passes."""
    lora_rank: t.CountOrZero = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: t.CountOrZero = 16
    """LoRA scale; adapter outputs are multiplied by lora_alpha / lora_rank."""
    target_modules: t.Texts = ("all-linear",)
    """Modules that get adapters: names, or all-linear (on Megatron including experts)."""
    exclude_modules: t.Text | tuple[t.Text, ...] = ()
    """Modules of those without adapters: a list of names, or a regular expression of whole names."""
    lora_A_init_method: Literal["kaiming", "xavier", "normal"] = "kaiming"
    """How the adapters' first factor starts: Kaiming-uniform, Xavier-normal or normal with deviation 0.2."""
    lora_adapter_path: t.LocalPath | None = None
    """Folder of a trained adapter to start from; its rank, scale and modules are taken."""

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained instead of the weights."""
        return bool(self.lora_rank) or self.lora_adapter_path is not None


class PolicyModelConfig(ModelConfig, ServedModelConfig):
    """A language model, and how it is loaded and wrapped for training."""


class OverrideOptimizerConfig(Section):
    """What only some optimizers have."""

    optimizer_cpu_offload: t.Flag = False
    """Keep the moments in host memory and step there: no device memory for them, a slower step."""
    momentum: t.Fraction = 0.95
    """Muon's decay rate of the momentum."""
    nesterov: t.Flag = True
    """Whether Muon orthogonalises Nesterov's momentum."""
    ns_steps: t.Count = 5
    """Muon's steps of Newton and Schulz."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How Muon scales lr by the shape of a matrix; match_rms_adamw takes a learning rate of AdamW's."""


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    optimizer: Annotated[
        Literal["AdamW", "AdamW8bit", "Muon"],
        BeforeValidator(lambda name: "AdamW" if name in ("adam", "adamw") else name),
    ] = "AdamW"
    """AdamW8bit keeps moments in 8 bits; Muon steps the matrices of the layers, and AdamW everything else."""
    optimizer_impl: Literal["torch.optim", "bitsandbytes.optim"] = "torch.optim"
    """Where the optimizer is from: bitsandbytes.optim for AdamW8bit, torch.optim for the others."""
    override_optimizer_config: OverrideOptimizerConfig = section(OverrideOptimizerConfig)
    """Settings of one optimizer alone."""
    lr: Annotated[float, Strict(), Field(ge=0, le=10)] = 1e-6
    """Peak learning rate."""
    weight_decay: t.Coefficient = 0.01
    """Decoupled weight decay."""
    betas: t.Betas = (0.9, 0.999)
    """AdamW's two decay rates."""
    eps: t.Positive = 1e-8
    """Added to AdamW's denominator."""
    lr_warmup_steps: t.CountOrOff = -1
    """Training steps of linear warm-up, each with all its mini-batches; -1 uses lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: t.Fraction = 0.0
    """Warm-up as a fraction of the run, if lr_warmup_steps is -1."""
    lr_scheduler_type: Scheduler = "constant"
    """Shape after the warm-up."""
    min_lr_ratio: t.Fraction = 0.0
    """Final learning rate of cosine and linear, as a fraction of lr."""
    lr_decay_steps: t.Count | None = None
    """Training steps after which cosine and linear are at their end; null is the length of the run."""


class CriticOptimConfig(OptimConfig):
    """The optimizer of the critic."""

    lr: Annotated[float, Strict(), Field(ge=0, le=10)] = 1e-5
    """Peak learning rate."""


class ShardConfig(Section):
    """How FSDP2 shards a model."""

    fsdp_size: t.CountOrAll = -1
    """Ranks that one copy of the model is sharded over; -1, or more than there are, is all; fewer is HSDP."""
    tensor_parallel_size: t.Count = 1
    """Ranks of them that split each matrix and all see the same samples."""
    offload_policy: t.Flag = False
    """Let FSDP2 always keep parameters and optimizer in host memory (slower, least device memory)."""
    reshard_after_forward: t.Flag = True
    """Free gathered parameters after each layer's forward pass."""
    forward_prefetch: t.Flag = False
    """Gather the next layer's parameters during the forward pass of a layer."""
    use_torch_compile: t.Flag = False
    """Compile the layers: faster steps after a first one that takes up to a minute longer; not set, or auto, a PPO job
    on GPUs does so for models of text where that is known to work."""
    model_dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(_dtype)] = "float32"
    """dtype of the weights."""
    dtype: AnyDType = "auto"
    """dtype of the computation; auto is bfloat16 on CUDA and float32 on CPU."""
    seed: t.Seed = 42
    """Seed of newly initialized weights (value heads, LoRA)."""
    full_determinism: t.Flag = False
    """Use bitwise reproducible CUDA kernels; this applies to the whole process."""


class RoleShardConfig(ShardConfig):
    """How FSDP2 shards a model that shares its ranks with other roles."""

    param_offload: t.Flag = False
    """Offload parameters to host memory while another role runs."""


class FSDPConfig(RoleShardConfig):
    """How FSDP2 shards a trained model that shares its ranks with other roles."""

    optimizer_offload: t.Flag = False
    """Offload optimizer state to host memory between updates."""
    full_determinism: t.Flag = linked("actor_rollout_ref.rollout.full_determinism")
    """Use bitwise reproducible CUDA kernels; this applies to the whole process."""


class LogProbConfig(Section):
    """Forward passes for log-probs: as the actor's updates, unless set."""

    log_prob_micro_batch_size_per_gpu: t.Count | None = linked("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    """Samples per forward pass on a rank when log-probs are recomputed."""
    log_prob_use_dynamic_bsz: t.Flag = linked("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill these passes up to a number of tokens instead of samples."""
    log_prob_max_token_len_per_gpu: t.Count = linked("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens per pass on a rank."""

    @property
    def scoring(self) -> t.MicroBatches:
        """The micro-batches of these passes."""
        rows, max_tokens = self.log_prob_micro_batch_size_per_gpu, self.log_prob_max_token_len_per_gpu
        return t.micro_batches(self.log_prob_use_dynamic_bsz, rows, max_tokens)


class CheckpointConfig(Section):
    """The contents of checkpoints."""

    save_contents: CheckpointParts = ("model", "optimizer", "extra")
    """Parts to save; hf_model adds a Hugging Face folder for other tools."""
    load_contents: CheckpointParts = linked(".save_contents")
    """Parts to load from a checkpoint on resume."""
    async_save: t.Flag = False
    """Write checkpoints beside the next step, which waits for a copy in host memory at most; a Hugging Face folder is
    written at once."""
