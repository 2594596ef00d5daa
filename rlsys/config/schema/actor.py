"""The policy and the value function: actor, reference, critic."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from rlsys.config.schema import model as m
from rlsys.config.schema import types as t
from rlsys.config.schema.base import Registered, Section, linked, section
from rlsys.config.schema.megatron import MegatronConfig, MegatronRoleConfig
from rlsys.config.schema.rollout import RolloutConfig
from rlsys.config.vocabulary import POLICY_LOSSES, KLEstimator, LossAggMode

_ACTOR = "actor_rollout_ref.actor"


class PolicyLossConfig(Section):
    """The policy loss and the parameters that only some losses have."""

    loss_mode: Annotated[t.Text, Registered(POLICY_LOSSES)] = "vanilla"
    """Policy loss."""
    clip_cov_ratio: t.Fraction = 0.0002
    """clip_cov: fraction of tokens whose gradient is dropped."""
    clip_cov_lb: t.Coefficient = 1.0
    """clip_cov: smallest covariance of a dropped token."""
    clip_cov_ub: t.Coefficient = 5.0
    """clip_cov: largest covariance of a dropped token."""
    kl_cov_ratio: t.Fraction = 0.0002
    """kl_cov: fraction of tokens that get the KL penalty."""
    ppo_kl_coef: t.Coefficient = 0.1
    """kl_cov: weight of that penalty."""
    dro_beta: t.Positive | None = None
    """dro: weight of the squared log-ratio; must be set for it."""


class RouterReplayConfig(Section):
    """The experts that the actor's routers choose are replayed."""

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    """R2: the update takes the experts that old_log_probs took; R3: both take those of the rollout, which needs
    rollout.enable_rollout_routing_replay."""


class TrainedRoleConfig(Section):
    """What actor and critic have in common."""

    strategy: t.Strategy = "fsdp"
    """Training engine of actor and reference: fsdp and fsdp2 are both FSDP2, megatron is Megatron-Core."""
    ppo_mini_batch_size: t.Count = 256
    """Prompts per optimizer step (each with rollout.n samples); unless set, data.train_batch_size if 256 does not
    divide that."""
    ppo_micro_batch_size_per_gpu: t.Count | None = None
    """Samples per forward and backward pass on a rank; null with use_dynamic_bsz=false is the rank's whole share."""
    use_dynamic_bsz: t.Flag = False
    """Fill micro-batches up to a number of tokens instead of samples; unless set, true if no number of samples is."""
    ppo_max_token_len_per_gpu: t.Count = 16384
    """Tokens per micro-batch on a rank, with use_dynamic_bsz; not set, or auto, a job chooses by its memory plan."""
    ppo_epochs: t.Count = 1
    """PPO epochs per step."""
    shuffle: t.Flag = False
    """Reshuffle the samples every epoch."""
    data_loader_seed: t.Seed = 42
    """Seed of that shuffling."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses are aggregated."""
    loss_scale_factor: t.Positive | None = None
    """Divisor of seq-mean-token-sum-norm; null is data.max_response_length."""
    grad_clip: t.Coefficient = 1.0
    """Largest gradient norm; 0 disables clipping."""
    ulysses_sequence_parallel_size: t.Count = 1
    """Ranks that one sequence is split over."""
    optim: m.OptimConfig = section(m.OptimConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: m.CheckpointConfig = section(m.CheckpointConfig)

    @property
    def training(self) -> t.MicroBatches:
        """The micro-batches of updates."""
        return t.micro_batches(self.use_dynamic_bsz, self.ppo_micro_batch_size_per_gpu, self.ppo_max_token_len_per_gpu)


class ActorConfig(TrainedRoleConfig):
    """The trained policy."""

    freeze_vision_tower: t.Flag = False
    """Do not train the image encoder of a vision-language model."""
    clip_ratio: t.Coefficient = 0.2
    """PPO's clip range on both sides."""
    clip_ratio_low: t.Coefficient = linked(".clip_ratio")
    """Clip range below 1; the divergence bound of dppo_tv and dppo_kl."""
    clip_ratio_high: t.Coefficient = linked(".clip_ratio")
    """Clip range above 1 (DAPO's clip-higher); the divergence bound of dppo_tv and dppo_kl."""
    clip_ratio_c: Annotated[float, Strict(), Field(gt=1, le=1e6)] = 3.0
    """Dual clip: bound of the loss for negative advantages."""
    tau_pos: t.Positive = 1.0
    """sapo: temperature for positive advantages."""
    tau_neg: t.Positive = 1.05
    """sapo: temperature for negative advantages."""
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    entropy_coeff: Annotated[float, Strict(), Field(ge=-1e3, le=1e3)] = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: t.Flag = False
    """Report the entropy of the updates, not only that of the old policy, even if entropy_coeff is 0."""
    use_kl_loss: t.Flag = False
    """Add a KL loss against the reference."""
    kl_loss_coef: t.Coefficient = 0.001
    """Weight of the KL loss."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Estimator of the KL loss; + is its straight-through form."""
    fsdp_config: m.FSDPConfig = section(m.FSDPConfig)
    router_replay: RouterReplayConfig = section(RouterReplayConfig)

    @property
    def shard(self) -> m.FSDPConfig | MegatronConfig:
        """The section of its training engine."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config


class RefModelConfig(Section):
    """The reference's model, with the actor's vocabulary."""

    path: t.LocalPath | None = None
    """Hugging Face model: a folder, a hub id, or a run or checkpoint; null is the model that the actor starts from."""
    trust_remote_code: t.Flag = linked("actor_rollout_ref.model.trust_remote_code")
    """Allow Python code in the model folder to run."""


class RefConfig(m.LogProbConfig):
    """The frozen policy of the KL terms."""

    model: RefModelConfig = section(RefModelConfig)
    ulysses_sequence_parallel_size: t.Count = linked("actor_rollout_ref.actor.ulysses_sequence_parallel_size")
    """Ranks that one sequence is split over."""
    fsdp_config: m.RoleShardConfig = section(
        m.RoleShardConfig,
        follows=f"{_ACTOR}.fsdp_config",
        only=(
            *("fsdp_size", "tensor_parallel_size", "reshard_after_forward", "forward_prefetch", "use_torch_compile"),
            *("model_dtype", "dtype", "full_determinism"),
        ),
    )
    megatron: MegatronRoleConfig = section(MegatronRoleConfig, follows=f"{_ACTOR}.megatron")


class ActorRolloutRefConfig(Section):
    """The policy in its three roles."""

    model: m.PolicyModelConfig = section(m.PolicyModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    hybrid_engine: t.Flag | None = None
    """Whether the actor's processes also generate; null follows from trainer.rollout_workers and the engine."""
    nccl_timeout: t.Seconds = 600.0
    """Longest a collective operation may take, in seconds."""

    @property
    def reference_model(self) -> m.PolicyModelConfig:
        """The reference's model: the actor's own section unless ref.model.path names another one."""
        ref = self.ref.model
        return self.model if ref.path in (None, self.model.path) else self.frozen_model(ref.path, ref.trust_remote_code)

    @property
    def ref_shard(self) -> m.RoleShardConfig | MegatronRoleConfig:
        """The section of the training engine of frozen models, which is the actor's."""
        return self.ref.megatron if self.actor.strategy == "megatron" else self.ref.fsdp_config

    def frozen_model(self, path: str | None, trust_remote_code: bool) -> m.PolicyModelConfig:
        """Another model that reads the policy's rows."""
        packed = self.model.use_remove_padding
        return m.PolicyModelConfig(path=path, trust_remote_code=trust_remote_code, use_remove_padding=packed)

    @property
    def has_reference_weights(self) -> bool:
        """Whether a reference has weights of its own; else it is the actor without its adapters."""
        return self.reference_model is not self.model or not self.model.has_adapters


class CriticConfig(TrainedRoleConfig):
    """The value function: by default a value head on the actor's model, trained as the actor is."""

    enable: t.Flag | None = None
    """Train a critic; null trains one if the estimator is gae."""
    model: m.ModelConfig = section(
        m.ModelConfig,
        follows="actor_rollout_ref.model",
        only=("path", "trust_remote_code", "external_lib", "enable_gradient_checkpointing", "use_remove_padding"),
    )
    optim: m.CriticOptimConfig = section(m.CriticOptimConfig)
    fsdp: m.FSDPConfig = section(m.FSDPConfig)
    forward_micro_batch_size_per_gpu: t.Count | None = linked(".ppo_micro_batch_size_per_gpu")
    """Samples per forward pass when values are computed."""
    ppo_max_token_len_per_gpu: t.Count = 32768
    """Tokens per micro-batch on a rank, with use_dynamic_bsz; not set, or auto, a job chooses by its memory plan."""
    forward_max_token_len_per_gpu: t.Count = linked(".ppo_max_token_len_per_gpu")
    """Tokens per forward pass when values are computed."""
    cliprange_value: t.Positive = 0.5
    """Clip range of the value loss."""

    @property
    def shard(self) -> m.FSDPConfig | MegatronConfig:
        """The section of its training engine."""
        return self.megatron if self.strategy == "megatron" else self.fsdp

    @property
    def scoring(self) -> t.MicroBatches:
        """The micro-batches in which values are computed."""
        rows, max_tokens = self.forward_micro_batch_size_per_gpu, self.forward_max_token_len_per_gpu
        return t.micro_batches(self.use_dynamic_bsz, rows, max_tokens)
