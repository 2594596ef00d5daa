"""Advantages, rewards and corrections."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from rlsys.config.engines import IN_JOB_ENGINES
from rlsys.config.schema import types as t
from rlsys.config.schema.base import Registered, Section, linked, open_dict, section
from rlsys.config.schema.model import ServedModelConfig
from rlsys.config.schema.rollout import GenerationConfig, ServingConfig
from rlsys.config.vocabulary import ADV_ESTIMATORS, REWARD_MANAGERS, KLEstimator

Level = Literal["batch", "group"]


class KLControlConfig(Section):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the weight, or adapt it towards target_kl."""
    kl_coef: t.Coefficient = 0.001
    """The weight, or its initial value."""
    horizon: t.Count = 10000
    """adaptive: number of samples over which the weight reacts."""
    target_kl: t.Positive = 0.1
    """adaptive: target KL."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: replace prompts whose answers all have the same score."""

    enable: t.Flag = False
    """Filter groups."""
    metric: t.Text | None = None
    """What must differ within a group: acc, score, seq_reward, seq_final_reward or a key your reward returns."""
    max_num_gen_batches: t.CountOrZero = 0
    """Stop with an error after this many generated batches per step; 0 is no limit."""


class RolloutCorrectionConfig(Section):
    """Corrections for samples from another policy (older weights, or other kernels)."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weight the loss by importance ratios of tokens or sequences."""
    rollout_is_threshold: t.Text = "2.0"
    """Upper bound that weights are truncated to, or "low_high", outside of which they are 0."""
    rollout_is_batch_normalize: t.Flag = False
    """Normalize the weights to a mean of 1 over the batch."""
    rollout_rs: t.Text | None = None
    """Drop tokens or sequences by token_k1|k2|k3, seq_sum_*, seq_mean_* or seq_max_k2|k3, or by token_m2
    (M2PO): the largest ratios, until the mean squared log ratio of the others is within the bound; commas join them."""
    rollout_rs_threshold: t.Text | None = None
    """Bound for each measure, joined by commas; k1 takes "low_high"."""
    rollout_rs_threshold_lower: t.Positive | None = None
    """Lower bound of the ratio trainer / rollout for k1, where rollout_rs_threshold is its upper bound alone."""
    rollout_token_veto_threshold: t.Positive | None = None
    """Drop sequences with a token whose ratio trainer / rollout is below it."""
    bypass_mode: t.Flag = False
    """Use the rollout's log-probs as old log-probs (saves a forward pass)."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss in bypass mode."""

    @property
    def corrects(self) -> bool:
        """Whether samples are weighted or dropped."""
        return any((self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold))


class NormConfig(Section):
    """AReaL's normalization: subtract a mean, divide by a standard deviation."""

    mean_level: Level | None = None
    """Samples that the mean is taken over; null subtracts nothing."""
    std_level: Level | None = None
    """Samples that the standard deviation is taken over; null does not divide."""
    mean_leave1out: t.Flag = False
    """Leave a sample out of its own mean."""
    std_unbiased: t.Flag = True
    """Divide by n - 1 in the standard deviation."""
    eps: t.Positive = 1e-5
    """Added to the standard deviation."""

    @property
    def enabled(self) -> bool:
        """Whether anything is subtracted or divided by."""
        return self.mean_level is not None or self.std_level is not None


class PFPPOConfig(Section):
    """How PF-PPO resamples by reward."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """pow: by |score| to a power; max_min: the best and the worst; max_random: more of the best."""
    weight_pow: t.Coefficient = 2.0
    """pow: the power."""


class DistillationLossConfig(Section):
    """How the divergence from the teacher is trained."""

    loss_mode: Literal[KLEstimator, "forward_kl_topk"] = "k3"
    """Estimator of the reverse KL from the sampled tokens (k1 only with use_policy_gradient), or the forward KL over
    the teacher's most likely tokens."""
    topk: t.Count = 32
    """forward_kl_topk: number of those tokens."""
    log_prob_min_clamp: t.Number | None = None
    """forward_kl_topk: log-probs below count as this."""
    use_policy_gradient: t.Flag = False
    """Train on its negative as advantages of a loss of their own, instead of on the divergence itself."""
    policy_loss_mode: Literal["vanilla"] = "vanilla"
    """use_policy_gradient: the policy loss."""
    clip_ratio: t.Coefficient = 0.2
    """use_policy_gradient: PPO's clip range on both sides."""
    clip_ratio_low: t.Coefficient = linked(".clip_ratio")
    """use_policy_gradient: clip range below 1."""
    clip_ratio_high: t.Coefficient = linked(".clip_ratio")
    """use_policy_gradient: clip range above 1."""
    use_task_rewards: t.Flag = True
    """Train on the rewards too; else on the teacher alone."""
    distillation_loss_coef: t.Coefficient = 1.0
    """Weight of the divergence beside the rewards."""
    loss_max_clamp: t.Positive | None = None
    """Largest magnitude of a token's divergence."""

    @property
    def is_topk(self) -> bool:
        """Whether the teacher's most likely tokens are compared, not the sampled ones."""
        return self.loss_mode == "forward_kl_topk"

    @property
    def weight(self) -> float:
        """What the divergence is multiplied by."""
        return self.distillation_loss_coef if self.use_task_rewards else 1.0


class TeacherInferenceConfig(Section, extra="allow"):
    """verl's settings of the engine that serves a teacher, of which its sizes count."""

    tensor_model_parallel_size: t.Count | None = None
    """With Megatron and distillation.nnodes, ranks that each matrix is sharded over."""
    pipeline_model_parallel_size: t.Count | None = None
    """With Megatron and distillation.nnodes, pipeline stages that the layers are split into."""


class TeacherConfig(Section):
    """A teacher's model, with the policy's vocabulary."""

    key: t.Text | None = None
    """Which rows it scores: those with this value in the column teacher_key. A single teacher scores all."""
    model_path: t.LocalPath | None = None
    """Hugging Face model: a folder, a hub id, or a run or checkpoint."""
    trust_remote_code: t.Flag = False
    """Allow Python code in the model folder to run."""
    num_replicas: t.CountOrZero | None = None
    """verl's number of copies; here the processes of the teachers share each model."""
    inference: TeacherInferenceConfig = section(TeacherInferenceConfig)
    """Sizes of its engine; all else is as actor_rollout_ref.ref sets."""


class DistillationConfig(Section):
    """On-policy distillation: teachers score what the policy samples."""

    enabled: t.Flag = False
    """Train towards teachers."""
    teacher_models: dict[str, TeacherConfig] = open_dict()
    """Teachers by a name of yours, each with model_path, trust_remote_code and, of several, the key of its rows."""
    teacher_key: t.Text = "data_source"
    """Column that says which of several teachers scores a row."""
    n_gpus_per_node: t.Count = 8
    """Processes per node that teachers have of their own."""
    nnodes: t.CountOrZero = 0
    """Nodes of those processes; 0 scores on the training processes."""
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)


class AlgorithmConfig(Section):
    """Advantage estimation."""

    adv_estimator: Annotated[t.Text, Registered(ADV_ESTIMATORS)] = "gae"
    """Advantage estimator."""
    gamma: t.Fraction = 1.0
    """Discount."""
    lam: t.Fraction = 1.0
    """GAE's lambda."""
    adv_unit: Literal["token", "turn"] = "token"
    """What GAE discounts by (token, turn) and groups compare (answers, turns of episodes); a turn's tokens share its
    advantage."""
    norm_adv_by_std_in_grpo: t.Flag = True
    """Divide GRPO advantages by the group's standard deviation; false is Dr. GRPO."""
    use_kl_in_reward: t.Flag = False
    """Subtract a KL penalty from the reward of each token."""
    kl_penalty: KLEstimator = "kl"
    """Estimator of that penalty."""
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    use_pf_ppo: t.Flag = False
    """Resample the samples of a step by reward (policy filtration)."""
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    gdpo_reward_keys: t.Texts | None = None
    """gdpo: keys of the reward's parts, each normalized separately."""
    gdpo_reward_weights: t.Numbers | None = None
    """gdpo: weights of these parts; null weights them equally."""
    reward_bias: t.Number = 0.0
    """Added to each score."""
    reward_scaling: t.Number = 1.0
    """Factor of the score, after reward_bias."""
    reward_clip: t.Positive | None = None
    """Largest absolute reward, after reward_scaling; null does not clip."""
    reward_norm: NormConfig = section(NormConfig)
    adv_norm: NormConfig = section(NormConfig)
    mask_no_eos_with_zero: t.Flag = False
    """Set the score of truncated responses to zero."""


class CustomRewardConfig(Section):
    """A custom reward function."""

    path: t.LocalPath | None = None
    """Python file of the function; null chooses a built-in one by data source."""
    name: t.Text = "compute_score"
    """Name of the function: compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)."""
    reward_kwargs: t.OpenDict = open_dict()
    """More arguments of the function."""


class ModuleConfig(Section):
    """A class in a file."""

    path: t.LocalPath | None = None
    """Python file."""
    name: t.Text = "custom_reward_manager"
    """Class in the file."""


class RewardManagerConfig(Section):
    """How scores become rewards."""

    name: Annotated[t.Text, Registered(REWARD_MANAGERS)] = "naive"
    """Reward manager; dapo adds the overlong penalty."""
    source: Literal["register", "importlib"] = "register"
    """Take the manager from the registry, or from the file module.path."""
    module: ModuleConfig = section(ModuleConfig)


class OverlongConfig(Section):
    """DAPO's soft penalty on long responses."""

    enable: t.Flag = False
    """Apply the penalty."""
    len: t.CountOrZero = 0
    """Number of tokens before the longest length over which the penalty rises."""
    penalty_factor: t.Coefficient = 1.0
    """Penalty at the longest length."""
    log: t.Flag = False
    """Report the penalty as metrics."""


class RewardKwargsConfig(Section, extra="allow"):
    """Settings of the dapo manager, and any keys that the constructor of a manager of your own takes."""

    overlong_buffer_cfg: OverlongConfig = section(OverlongConfig)
    max_resp_len: t.Count | None = None
    """Longest length for the penalty; null is data.max_response_length."""


class JudgeRolloutConfig(ServingConfig):
    """The engine of a generative reward model, which the reward function asks."""

    name: Annotated[t.Text | None, Registered(IN_JOB_ENGINES)] = None
    """Engine that serves the model to reward.custom_reward_function: hf, sglang or vllm; null if it is a classifier."""
    prompt_length: t.Count = 2048
    """Longest question, in tokens; a longer one is answered with an error."""
    response_length: t.Count = 2048
    """Longest answer, in tokens; a request may ask for less."""

    @property
    def generation(self) -> GenerationConfig:
        """The engine's section."""
        return GenerationConfig(**{name: getattr(self, name) for name in ServingConfig.model_fields})


class RewardModelConfig(Section):
    """Grading by a trained reward model."""

    enable: t.Flag = False
    """Grade with a reward model."""
    model_path: t.LocalPath | None = None
    """Folder of the model, e.g. one exported by trainer.main_rm."""
    trust_remote_code: t.Flag = False
    """Allow Python code in the model folder to run."""
    input_tokenizer: t.LocalPath | None = None
    """The policy's model, if the reward model has another tokenizer or chat template: answers are decoded, and rendered
    by the reward model's template; null passes token ids on."""
    enable_resource_pool: t.Flag = False
    """Run it in separate processes."""
    n_gpus_per_node: t.Count = 1
    """Processes per node of that pool."""
    nnodes: t.CountOrZero = 0
    """Nodes of that pool."""
    micro_batch_size_per_gpu: t.Count | None = None
    """Samples per forward pass on a rank."""
    use_dynamic_bsz: t.Flag = False
    """Fill forward passes up to a number of tokens instead of samples; unless set, true if no number of samples is."""
    forward_max_token_len_per_gpu: t.Count = 32768
    """Tokens per forward pass on a rank, with use_dynamic_bsz; not set, or auto, a job chooses by its memory plan."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the computation."""
    rollout: JudgeRolloutConfig = section(JudgeRolloutConfig)

    @property
    def scoring(self) -> t.MicroBatches:
        """The micro-batches in which it scores."""
        return t.micro_batches(self.use_dynamic_bsz, self.micro_batch_size_per_gpu, self.forward_max_token_len_per_gpu)

    @property
    def model(self) -> ServedModelConfig:
        """The model with its own tokenizer."""
        return ServedModelConfig(path=self.model_path, trust_remote_code=self.trust_remote_code)


class SandboxConfig(Section):
    """Processes that run generated code."""

    url: t.Url | None = None
    """Address of a SandboxFusion server that runs it instead (http://HOST:PORT/run_code)."""
    max_concurrent: t.Count = 64
    """Programs that run on that server at a time, over all grading processes, at least one each."""
    memory_limit_mb: Annotated[int, Strict(), Field(ge=16, le=1_048_576)] = 1024
    """Memory limit of a process, in MB."""


class GradingConfig(Section):
    """Grading by functions."""

    num_workers: t.CountOrZero = 8
    """Number of grading processes; 0 grades in this process without time limits, so that breakpoint() works."""
    max_failed: t.Fraction = 0.5
    """Share of a batch that may stay without a score (errors, timeouts); more ends the run."""
    timeout_s: t.Seconds = 10.0
    """Seconds to grade one answer; after that its process is killed and the answer counts as timed out."""
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    sandbox_fusion: SandboxConfig = section(SandboxConfig)

    @property
    def is_own(self) -> bool:
        """Whether a function or a manager of your own grades all rows, whatever their data source."""
        has_manager = self.reward_manager.source != "register" or self.reward_manager.name not in REWARD_MANAGERS
        return has_manager or self.custom_reward_function.path is not None

    @property
    def has_head(self) -> bool:
        """Whether a reward model scores by a head."""
        return False


class RewardConfig(GradingConfig):
    """Grading by functions and by a reward model."""

    reward_model: RewardModelConfig = section(RewardModelConfig)

    @property
    def has_judge(self) -> bool:
        """Whether the reward model answers questions of the reward function."""
        return all((self.reward_model.enable, self.reward_model.rollout.name, self.custom_reward_function.path))

    @property
    def has_head(self) -> bool:
        """Whether the reward model scores by a head."""
        return self.reward_model.enable and not self.has_judge
