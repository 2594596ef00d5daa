"""The five jobs' configurations. Attribute paths are verl's keys: cfg.actor_rollout_ref.actor.ppo_mini_batch_size."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from rlsys.config.engines import IN_JOB_ENGINES
from rlsys.config.schema import data as d
from rlsys.config.schema import trainer as run
from rlsys.config.schema import types as t
from rlsys.config.schema.actor import ActorConfig, ActorRolloutRefConfig, CriticConfig
from rlsys.config.schema.algorithm import AlgorithmConfig, DistillationConfig, GradingConfig, RewardConfig
from rlsys.config.schema.base import Registered, RootConfig, Section, section
from rlsys.config.schema.megatron import MegatronShardConfig, MegatronTrainConfig
from rlsys.config.schema.model import CheckpointConfig, OptimConfig, PolicyModelConfig, ServedModelConfig, ShardConfig
from rlsys.config.schema.rollout import GenerationConfig, ValKwargsConfig

FOLLOWED_BY_CRITIC = (
    *("strategy", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_epochs", "shuffle"),
    *("loss_agg_mode", "loss_scale_factor"),
)


class PPOConfig(RootConfig):
    """trainer.main_ppo: PPO, GRPO and related algorithms."""

    data: d.DataConfig = section(d.DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig, follows="actor_rollout_ref.actor", only=FOLLOWED_BY_CRITIC)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    reward: RewardConfig = section(RewardConfig)
    trainer: run.TrainerConfig = section(run.TrainerConfig)
    global_profiler: run.ProfilerConfig = section(run.ProfilerConfig)
    ray_kwargs: run.RayKwargsConfig = section(run.RayKwargsConfig)

    @property
    def use_critic(self) -> bool:
        """Whether a critic is trained: critic.enable, or if that is null whether the estimator is gae."""
        return self.critic.enable if self.critic.enable is not None else self.algorithm.adv_estimator == "gae"

    @property
    def use_reference(self) -> bool:
        """Whether a frozen reference is needed, for a KL loss or a KL penalty in the reward."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def teachers(self) -> dict[str, PolicyModelConfig]:
        """The models that teach, by the value of `distillation.teacher_key` in their rows; empty without any."""
        models, policy = self.distillation.teacher_models.values(), self.actor_rollout_ref
        if not self.distillation.enabled:
            return {}
        return {model.key or "": policy.frozen_model(model.model_path, model.trust_remote_code) for model in models}

    @property
    def teacher_policy(self) -> ActorRolloutRefConfig:
        """`actor_rollout_ref` for teachers: on processes of their own, Megatron's sizes are the largest of `inference`
        if any teacher sets them there."""
        policy, given = self.actor_rollout_ref, [model.inference for model in self.distillation.teacher_models.values()]
        tensor = max((one.tensor_model_parallel_size or 0 for one in given), default=0)
        stages = max((one.pipeline_model_parallel_size or 0 for one in given), default=0)
        if not self.distillation.nnodes or not tensor + stages:
            return policy
        sizes = MegatronShardConfig(tensor_model_parallel_size=tensor or 1, pipeline_model_parallel_size=stages or 1)
        every = {name: size for name, size in sizes.model_dump().items() if name.endswith("_size")}
        megatron = policy.ref.megatron.model_copy(update=every)
        return policy.model_copy(update={"ref": policy.ref.model_copy(update={"megatron": megatron})})

    @property
    def use_ref_settings(self) -> bool:
        """Whether a model runs as `actor_rollout_ref.ref` sets: a reference with weights of its own, or a teacher."""
        return (self.use_reference and self.actor_rollout_ref.has_reference_weights) or self.distillation.enabled


class SupervisedEngineConfig(ShardConfig):
    """The training engine of SFT, reward models and DPO."""

    strategy: t.Strategy = "fsdp2"
    """Training engine: fsdp and fsdp2 are both FSDP2, megatron is Megatron-Core."""
    megatron: MegatronTrainConfig = section(
        MegatronTrainConfig, follows="engine", only=("dtype", "full_determinism", "seed")
    )
    ulysses_sequence_parallel_size: t.Count = 1
    """Ranks that one sequence is split over."""

    @property
    def shard(self) -> "SupervisedEngineConfig | MegatronTrainConfig":
        """The section of the training engine."""
        return self.megatron if self.strategy == "megatron" else self


TrainedConfig = ActorConfig | CriticConfig | SupervisedEngineConfig
"""A model that is trained: its engine, and how samples are split."""


class SupervisedOptimConfig(OptimConfig):
    """The optimizer of SFT and reward models."""

    lr: t.Positive = 1e-5
    """Peak learning rate."""
    clip_grad: t.Coefficient = 1.0
    """Largest gradient norm; 0 disables clipping."""


class SupervisedConfig(RootConfig):
    """Keys shared by SFT, reward-model training and DPO."""

    data: d.SupervisedDataConfig = section(d.SupervisedDataConfig)
    model: PolicyModelConfig = section(PolicyModelConfig)
    engine: SupervisedEngineConfig = section(SupervisedEngineConfig)
    optim: SupervisedOptimConfig = section(SupervisedOptimConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    trainer: run.SupervisedRunConfig = section(run.SupervisedRunConfig)
    global_profiler: run.ProfilerConfig = section(run.ProfilerConfig)
    ray_kwargs: run.RayKwargsConfig = section(run.RayKwargsConfig)
    nccl_timeout: t.Seconds = 600.0
    """Longest a collective operation may take, in seconds."""


class SFTConfig(SupervisedConfig):
    """trainer.main_sft: supervised fine-tuning."""

    data: d.SFTDataConfig = section(d.SFTDataConfig)


class RMConfig(SupervisedConfig):
    """trainer.main_rm: a reward model from chosen and rejected responses (Bradley-Terry)."""

    data: d.RMDataConfig = section(d.RMDataConfig)


class DPOLossConfig(Section):
    """The loss on preferences, by TRL's names."""

    loss_type: Literal["sigmoid", "ipo", "kto"] = "sigmoid"
    """sigmoid: DPO on pairs; ipo: IPO on pairs; kto: KTO on single responses with a label."""
    beta: t.Positive = 0.1
    """How strongly the policy is held to the reference; more is closer."""
    label_smoothing: Annotated[float, Strict(), Field(ge=0, lt=0.5)] = 0.0
    """sigmoid: probability that a label is wrong (cDPO)."""
    desirable_weight: t.Positive = 1.0
    """kto: weight of desirable responses."""
    undesirable_weight: t.Positive = 1.0
    """kto: weight of undesirable responses."""


class DPOConfig(SupervisedConfig):
    """trainer.main_dpo: a policy from preferences, held to the model that it starts from."""

    data: d.DPODataConfig = section(d.DPODataConfig)
    dpo: DPOLossConfig = section(DPOLossConfig)


class EvalRolloutConfig(GenerationConfig):
    """Generation for evaluation."""

    name: Annotated[t.Text, Registered(IN_JOB_ENGINES)] = "hf"
    """Engine: hf (transformers), sglang, vllm, or one you registered."""
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig)


class EvalModelConfig(Section):
    """The evaluated policy."""

    model: ServedModelConfig = section(ServedModelConfig)
    rollout: EvalRolloutConfig = section(EvalRolloutConfig)


class EvalConfig(RootConfig):
    """trainer.main_eval: graded answers to validation prompts, with pass@k and maj@k per data source."""

    data: d.PromptsConfig = section(d.PromptsConfig)
    actor_rollout_ref: EvalModelConfig = section(EvalModelConfig)
    reward: GradingConfig = section(GradingConfig)
    trainer: run.EvalRunConfig = section(run.EvalRunConfig)
    ray_kwargs: run.RayKwargsConfig = section(run.RayKwargsConfig)


JobConfig = PPOConfig | SFTConfig | RMConfig | DPOConfig | EvalConfig
GradedJob = PPOConfig | EvalConfig
"""The jobs that generate answers and grade them."""
