"""Advantages, rewards and corrections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from rlsys.config.schema.base import (
    Coefficient,
    Count,
    CountOrZero,
    Flag,
    Fraction,
    LocalPath,
    Number,
    Numbers,
    OpenDict,
    Positive,
    Seconds,
    Section,
    Text,
    Texts,
    open_dict,
)
from rlsys.config.vocabulary import KLEstimator

Level = Literal["batch", "group"]


def _threshold(value: object) -> object:
    """A number or "low_high" becomes the text the corrections parse; anything else is left to be refused."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Threshold = Annotated[str, BeforeValidator(_threshold)]


class KLControlConfig(Section):
    """Weight of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the weight, or steer it to target_kl."""
    kl_coef: Coefficient = 0.001
    """The weight, or where it starts."""
    horizon: Count = 10000
    """adaptive: samples over which the weight reacts."""
    target_kl: Positive = 0.1
    """adaptive: KL to steer to."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: prompts whose answers all score the same are replaced."""

    enable: Flag = False
    """Replace them."""
    metric: Text | None = None
    """What must differ within a group: acc, score, seq_reward, seq_final_reward or a key your reward returns."""
    max_num_gen_batches: CountOrZero = 0
    """Give up after this many generated batches a step; 0 goes on."""


class RolloutCorrectionConfig(Section):
    """Corrections for samples that another policy (older, or another kernel) wrote."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weight the loss by importance ratios of tokens or of whole sequences."""
    rollout_is_threshold: Threshold = "2.0"
    """Upper bound of the weights (truncated), or "low_high" (outside: zero)."""
    rollout_is_batch_normalize: Flag = False
    """Scale the weights to mean 1 over the batch."""
    rollout_rs: Text | None = None
    """Drop tokens or sequences by token_k1|k2|k3, seq_sum_*, seq_mean_* or seq_max_k2|k3; commas join several."""
    rollout_rs_threshold: Threshold | None = None
    """Bound for each measure, joined by commas; k1 takes "low_high"."""
    bypass_mode: Flag = False
    """Take the rollout's log-probs as the old ones (saves a forward pass)."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss in bypass mode."""


class NormConfig(Section):
    """AReaL's normalisation: subtract a mean, divide by a deviation."""

    mean_level: Level | None = None
    """Over what the mean is taken; null subtracts nothing."""
    std_level: Level | None = None
    """Over what the deviation is taken; null divides by nothing."""
    mean_leave1out: Flag = False
    """Leave the sample itself out of its mean."""
    std_unbiased: Flag = True
    """Divide by n - 1 in the deviation."""
    eps: Positive = 1e-5
    """Added to the deviation."""

    @property
    def enabled(self) -> bool:
        """Whether anything is subtracted or divided by."""
        return self.mean_level is not None or self.std_level is not None


class PFPPOConfig(Section):
    """How PF-PPO draws samples by their reward."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """pow: by |score| to a power; max_min: the best and the worst; max_random: more of the best."""
    weight_pow: Coefficient = 2.0
    """pow: the power."""


class AlgorithmConfig(Section):
    """Advantage estimation."""

    adv_estimator: Text = "gae"
    """gae, grpo, grpo_passk, rloo, reinforce_plus_plus, remax, opo, gpg, gdpo and others, or one you registered."""
    gamma: Fraction = 1.0
    """Discount."""
    lam: Fraction = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: Flag = True
    """Divide GRPO advantages by the group's deviation; false is Dr.GRPO."""
    use_kl_in_reward: Flag = False
    """Subtract a KL penalty from the reward of each token."""
    kl_penalty: KLEstimator = "kl"
    """Estimator of that penalty."""
    kl_ctrl: KLControlConfig = Field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    use_pf_ppo: Flag = False
    """Draw the samples of a step again by their reward (policy filtration)."""
    pf_ppo: PFPPOConfig = Field(default_factory=PFPPOConfig)
    gdpo_reward_keys: Texts | None = None
    """gdpo: keys of the reward's parts, each normalised by itself."""
    gdpo_reward_weights: Numbers | None = None
    """gdpo: weights of these parts; null weighs them alike."""
    reward_bias: Number = 0.0
    """Added to each score first."""
    reward_scaling: Number = 1.0
    """Then multiplied with it."""
    reward_clip: Positive | None = None
    """Then clipped to plus and minus this; null does not clip."""
    reward_norm: NormConfig = Field(default_factory=NormConfig)
    adv_norm: NormConfig = Field(default_factory=NormConfig)
    mask_no_eos_with_zero: Flag = False
    """Give responses that were cut off a score of zero."""

    @property
    def shapes_rewards(self) -> bool:
        """Whether AReaL's reward stage changes anything."""
        scaled = self.reward_bias != 0.0 or self.reward_scaling != 1.0 or self.reward_clip is not None
        return scaled or self.reward_norm.enabled or self.mask_no_eos_with_zero


class CustomRewardConfig(Section):
    """A reward function of yours."""

    path: LocalPath | None = None
    """Python file that holds it; null chooses a built-in one by data source."""
    name: Text = "compute_score"
    """Its name: compute_score(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)."""
    reward_kwargs: OpenDict = open_dict()
    """More arguments for it."""


class ModuleConfig(Section):
    """A class in a file."""

    path: LocalPath | None = None
    """Python file."""
    name: Text = "custom_reward_manager"
    """Class in it."""


class RewardManagerConfig(Section):
    """How scores become rewards."""

    name: Text = "naive"
    """naive, or dapo (adds the overlong penalty)."""
    source: Literal["register", "importlib"] = "register"
    """Take it from the registry, or from the file in module.path."""
    module: ModuleConfig = Field(default_factory=ModuleConfig)


class OverlongConfig(Section):
    """DAPO's soft penalty on long responses."""

    enable: Flag = False
    """Apply it."""
    len: CountOrZero = 0
    """Tokens before the longest length over which the penalty rises."""
    penalty_factor: Coefficient = 1.0
    """Penalty at the longest length."""
    log: Flag = False
    """Report it as metrics."""


class RewardKwargsConfig(Section):
    """Settings of the dapo manager."""

    overlong_buffer_cfg: OverlongConfig = Field(default_factory=OverlongConfig)
    max_resp_len: Count | None = None
    """Longest length for the penalty; null takes data.max_response_length."""


class RewardModelConfig(Section):
    """A trained reward model as grader."""

    enable: Flag = False
    """Use one."""
    model_path: LocalPath | None = None
    """Folder of it, e.g. what trainer.main_rm exported."""
    trust_remote_code: Flag = False
    """Let its own Python files run."""
    enable_resource_pool: Flag = False
    """Give it processes of its own."""
    n_gpus_per_node: Count = 1
    """Processes a node of that pool."""
    nnodes: CountOrZero = 0
    """Nodes of that pool."""
    micro_batch_size_per_gpu: Count | None = None
    """Samples of one forward pass on a rank."""
    use_dynamic_bsz: Flag = False
    """Fill forward passes by tokens instead of by samples."""
    forward_max_token_len_per_gpu: Count = 32768
    """Tokens of one forward pass on a rank, with use_dynamic_bsz."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the computation."""


class SandboxConfig(Section):
    """Limits of the process that runs generated code."""

    memory_limit_mb: Annotated[int, Strict(), Field(ge=16, le=1_048_576)] = 1024
    """Memory it may use."""


class RewardConfig(Section):
    """Grading."""

    num_workers: Count = 8
    """Processes that grade."""
    timeout_s: Seconds = 10.0
    """Seconds one answer may take; then its process is killed and the answer counts as timed out."""
    custom_reward_function: CustomRewardConfig = Field(default_factory=CustomRewardConfig)
    reward_manager: RewardManagerConfig = Field(default_factory=RewardManagerConfig)
    reward_kwargs: RewardKwargsConfig = Field(default_factory=RewardKwargsConfig)
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    sandbox_fusion: SandboxConfig = Field(default_factory=SandboxConfig)
