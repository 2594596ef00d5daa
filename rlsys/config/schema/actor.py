"""The policy and the value function: actor, reference, critic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from rlsys.config.schema.base import (
    Coefficient,
    Count,
    Flag,
    Fraction,
    Positive,
    Seconds,
    Section,
    Seed,
    Strategy,
    Text,
    linked,
)
from rlsys.config.schema.megatron import MegatronConfig, RefMegatronConfig
from rlsys.config.schema.model import (
    CheckpointConfig,
    CriticModelConfig,
    CriticOptimConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    RefShardConfig,
)
from rlsys.config.schema.rollout import RolloutConfig
from rlsys.config.vocabulary import KLEstimator, LossAggMode

Clip = Annotated[float, Strict(), Field(ge=0, le=1e6)]


class PolicyLossConfig(Section):
    """Which policy loss, and the numbers only some losses have."""

    loss_mode: Text = "vanilla"
    """vanilla, gspo, cispo, sapo, gpg, geo_mean, clip_cov, kl_cov, dppo_tv, dppo_kl, dro, or one you registered."""
    clip_cov_ratio: Fraction = 0.0002
    """clip_cov: part of the tokens whose gradient is dropped."""
    clip_cov_lb: Coefficient = 1.0
    """clip_cov: lowest covariance of a dropped token."""
    clip_cov_ub: Coefficient = 5.0
    """clip_cov: highest covariance of a dropped token."""
    kl_cov_ratio: Fraction = 0.0002
    """kl_cov: part of the tokens that get the KL penalty."""
    ppo_kl_coef: Coefficient = 0.1
    """kl_cov: weight of that penalty."""
    dro_beta: Positive = 1.0
    """dro: weight of the squared log-ratio."""


class ActorConfig(Section):
    """The policy that is trained."""

    strategy: Strategy = "fsdp"
    """Training engine of actor and reference; fsdp and fsdp2 both mean FSDP2, megatron Megatron-Core."""
    ppo_mini_batch_size: Count = 256
    """Prompts of one optimizer step (times rollout.n samples)."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Samples of one forward and backward pass on a rank; null with use_dynamic_bsz false takes the whole share."""
    use_dynamic_bsz: Flag = False
    """Fill micro-batches by tokens instead of by samples."""
    ppo_max_token_len_per_gpu: Count = 16384
    """Tokens of one micro-batch on a rank, with use_dynamic_bsz."""
    ppo_epochs: Count = 1
    """Times the samples of a step are gone through."""
    shuffle: Flag = False
    """Mix the samples anew in each of these epochs."""
    data_loader_seed: Seed = 42
    """Seed of that mixing."""
    clip_ratio: Clip = 0.2
    """PPO's clip range on both sides."""
    clip_ratio_low: Clip = linked(".clip_ratio")
    """Clip range below 1; the divergence bound of dppo_tv and dppo_kl."""
    clip_ratio_high: Clip = linked(".clip_ratio")
    """Clip range above 1 (DAPO's clip-higher); the divergence bound of dppo_tv and dppo_kl."""
    clip_ratio_c: Annotated[float, Strict(), Field(gt=1, le=1e6)] = 3.0
    """Dual clip: bound of the loss where the advantage is negative."""
    tau_pos: Positive = 1.0
    """sapo: temperature where the advantage is positive."""
    tau_neg: Positive = 1.05
    """sapo: temperature where the advantage is negative."""
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number."""
    loss_scale_factor: Positive | None = None
    """Divisor of seq-mean-token-sum-norm; null takes data.max_response_length."""
    entropy_coeff: Annotated[float, Strict(), Field(ge=-1e3, le=1e3)] = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: Flag = False
    """Report the entropy even where entropy_coeff is 0."""
    use_kl_loss: Flag = False
    """Add a KL loss against the reference."""
    kl_loss_coef: Coefficient = 0.001
    """Weight of the KL loss."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Estimator of the KL loss; + is its straight-through form."""
    grad_clip: Coefficient = 1.0
    """Largest gradient norm; 0 never clips."""
    ulysses_sequence_parallel_size: Count = 1
    """Ranks that share one sequence."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)


class RefConfig(Section):
    """The frozen policy that KL terms compare with."""

    log_prob_micro_batch_size_per_gpu: Count | None = linked("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    """Samples of one forward pass on a rank."""
    log_prob_use_dynamic_bsz: Flag = linked("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill forward passes by tokens instead of by samples."""
    log_prob_max_token_len_per_gpu: Count = linked("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Tokens of one forward pass on a rank."""
    ulysses_sequence_parallel_size: Count = linked("actor_rollout_ref.actor.ulysses_sequence_parallel_size")
    """Ranks that share one sequence."""
    fsdp_config: RefShardConfig = Field(default_factory=RefShardConfig)
    megatron: RefMegatronConfig = Field(default_factory=RefMegatronConfig)


class ActorRolloutRefConfig(Section):
    """The policy in its three roles."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    ref: RefConfig = Field(default_factory=RefConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    hybrid_engine: Flag | None = None
    """True: the actor's processes also generate; false: processes of their own do; null: as the pools say."""
    nccl_timeout: Seconds = 600.0
    """Seconds a collective may take."""


class CriticConfig(Section):
    """The value function."""

    enable: Flag | None = None
    """Train a critic; null does so where the estimator is gae."""
    strategy: Strategy = linked("actor_rollout_ref.actor.strategy")
    """Training engine."""
    model: CriticModelConfig = Field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    fsdp: FSDPConfig = Field(default_factory=FSDPConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    ppo_mini_batch_size: Count = linked("actor_rollout_ref.actor.ppo_mini_batch_size")
    """Prompts of one optimizer step (times rollout.n samples)."""
    ppo_micro_batch_size_per_gpu: Count | None = linked("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")
    """Samples of one forward and backward pass on a rank."""
    forward_micro_batch_size_per_gpu: Count | None = linked(".ppo_micro_batch_size_per_gpu")
    """Samples of one forward pass when values are computed."""
    use_dynamic_bsz: Flag = linked("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill micro-batches by tokens instead of by samples."""
    ppo_max_token_len_per_gpu: Count = 32768
    """Tokens of one micro-batch on a rank, with use_dynamic_bsz."""
    forward_max_token_len_per_gpu: Count = linked(".ppo_max_token_len_per_gpu")
    """Tokens of one forward pass when values are computed."""
    ppo_epochs: Count = linked("actor_rollout_ref.actor.ppo_epochs")
    """Times the samples of a step are gone through."""
    shuffle: Flag = linked("actor_rollout_ref.actor.shuffle")
    """Mix the samples anew in each of these epochs."""
    data_loader_seed: Seed = 42
    """Seed of that mixing."""
    cliprange_value: Positive = 0.5
    """Clip range of the value loss."""
    loss_agg_mode: LossAggMode = linked("actor_rollout_ref.actor.loss_agg_mode")
    """How token losses become one number."""
    loss_scale_factor: Positive | None = linked("actor_rollout_ref.actor.loss_scale_factor")
    """Divisor of seq-mean-token-sum-norm; null takes data.max_response_length."""
    grad_clip: Coefficient = 1.0
    """Largest gradient norm; 0 never clips."""
    ulysses_sequence_parallel_size: Count = 1
    """Ranks that share one sequence."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
