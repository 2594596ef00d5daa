"""The four jobs' configurations. Attribute paths are verl's keys: cfg.actor_rollout_ref.actor.ppo_mini_batch_size."""

from __future__ import annotations

from pydantic import Field

from rlsys.config.schema.actor import ActorRolloutRefConfig, CriticConfig
from rlsys.config.schema.algorithm import AlgorithmConfig, RewardConfig
from rlsys.config.schema.base import (
    Coefficient,
    Count,
    Positive,
    Seconds,
    Section,
    SupervisedStrategy,
    Text,
    resolve_links_from,
)
from rlsys.config.schema.data import DataConfig, PromptsConfig, RMDataConfig, SFTDataConfig, SupervisedDataConfig
from rlsys.config.schema.model import CheckpointConfig, ModelConfig, OptimConfig, ShardConfig
from rlsys.config.schema.rollout import GenerationConfig, ValKwargsConfig
from rlsys.config.schema.trainer import EvalRunConfig, RayKwargsConfig, SupervisedRunConfig, TrainerConfig


class PPOConfig(Section):
    """trainer.main_ppo: PPO, GRPO and related algorithms."""

    data: DataConfig = Field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = Field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    ray_kwargs: RayKwargsConfig = Field(default_factory=RayKwargsConfig)

    @property
    def use_critic(self) -> bool:
        """Whether a critic is trained: critic.enable, or if that is null whether the estimator is gae."""
        return self.critic.enable if self.critic.enable is not None else self.algorithm.adv_estimator == "gae"

    @property
    def use_reference(self) -> bool:
        """Whether a frozen reference is needed, for a KL loss or a KL penalty in the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward


resolve_links_from(PPOConfig)


class SupervisedEngineConfig(ShardConfig):
    """FSDP2 for SFT and reward models."""

    strategy: SupervisedStrategy = "fsdp2"
    """Training engine; fsdp and fsdp2 both mean FSDP2."""
    ulysses_sequence_parallel_size: Count = 1
    """Ranks that share one sequence."""


class SupervisedOptimConfig(OptimConfig):
    """AdamW for SFT and reward models."""

    lr: Positive = 1e-5
    """Peak learning rate."""
    clip_grad: Coefficient = 1.0
    """Largest gradient norm; 0 never clips."""


class SupervisedConfig(Section):
    """What SFT and reward-model training share."""

    data: SupervisedDataConfig = Field(default_factory=SupervisedDataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: SupervisedEngineConfig = Field(default_factory=SupervisedEngineConfig)
    optim: SupervisedOptimConfig = Field(default_factory=SupervisedOptimConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    trainer: SupervisedRunConfig = Field(default_factory=SupervisedRunConfig)
    ray_kwargs: RayKwargsConfig = Field(default_factory=RayKwargsConfig)
    nccl_timeout: Seconds = 600.0
    """Seconds a collective may take."""


class SFTConfig(SupervisedConfig):
    """trainer.main_sft: supervised fine-tuning."""

    data: SFTDataConfig = Field(default_factory=SFTDataConfig)


class RMConfig(SupervisedConfig):
    """trainer.main_rm: a reward model from chosen and rejected responses (Bradley-Terry)."""

    data: RMDataConfig = Field(default_factory=RMDataConfig)


class EvalRolloutConfig(GenerationConfig):
    """Generation for evaluation."""

    name: Text = "hf"
    """Engine: hf (transformers), sglang, vllm, or one you registered."""
    val_kwargs: ValKwargsConfig = Field(default_factory=ValKwargsConfig)


class EvalModelConfig(Section):
    """The policy that is evaluated."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    rollout: EvalRolloutConfig = Field(default_factory=EvalRolloutConfig)


class EvalConfig(Section):
    """trainer.main_eval: answers to validation prompts, graded, with pass@k and maj@k for each data source."""

    data: PromptsConfig = Field(default_factory=PromptsConfig)
    actor_rollout_ref: EvalModelConfig = Field(default_factory=EvalModelConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    trainer: EvalRunConfig = Field(default_factory=EvalRunConfig)
    ray_kwargs: RayKwargsConfig = Field(default_factory=RayKwargsConfig)
