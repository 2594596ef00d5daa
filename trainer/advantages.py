"""From scores to advantages, as configured: reward shaping, KL penalty, rollout correction, estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsys.algorithms import (
    PFPPO,
    KLController,
    NormSettings,
    PolicyLossParams,
    RewardSettings,
    RolloutCorrection,
    add_selected_tokens,
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantage,
    get_kl_controller,
    probs_diff_metrics,
    rewards_from_scores,
    shape_batch_rewards,
)
from rlsys.config import PPOConfig
from rlsys.config.schema.algorithm import AlgorithmConfig, NormConfig
from rlsys.protocol import DataProto
from workers.build import policy_loss_params


@dataclass(frozen=True)
class AdvantageSettings:
    """Everything the controller needs to turn graded rows into advantages."""

    estimator: str
    arguments: dict[str, Any]
    rewards: RewardSettings | None
    correction: RolloutCorrection | None
    kl_penalty: str | None
    loss_mode: str
    loss_params: PolicyLossParams


def policy_loss_mode(cfg: PPOConfig) -> str:
    """The name of the policy loss; bypass mode has its own, which corrects inside the loss."""
    bypass = cfg.algorithm.rollout_correction.bypass_mode
    return "bypass_mode" if bypass else cfg.actor_rollout_ref.actor.policy_loss.loss_mode


def advantage_settings(cfg: PPOConfig) -> AdvantageSettings:
    """The settings of a run."""
    algorithm, answers = cfg.algorithm, cfg.actor_rollout_ref.rollout.n
    return AdvantageSettings(
        estimator=algorithm.adv_estimator,
        arguments={
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "num_repeat": answers,
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
            "gdpo_reward_keys": algorithm.gdpo_reward_keys or (),
            "gdpo_reward_weights": algorithm.gdpo_reward_weights,
            "adv_norm": _norm(algorithm.adv_norm),
            "pf_ppo": _resampling(algorithm),
        },
        rewards=_reward_settings(cfg),
        correction=rollout_correction(cfg),
        kl_penalty=algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        loss_mode=policy_loss_mode(cfg),
        loss_params=policy_loss_params(cfg.actor_rollout_ref.actor, correction=rollout_correction(cfg)),
    )


def kl_controller(cfg: PPOConfig) -> KLController:
    """The weight of the KL term in the reward; its state is part of a checkpoint."""
    control = cfg.algorithm.kl_ctrl
    return get_kl_controller(
        control.type, kl_coef=control.kl_coef, horizon=control.horizon, target_kl=control.target_kl
    )


def rewards_to_advantages(
    batch: DataProto, settings: AdvantageSettings, controller: KLController
) -> tuple[DataProto, dict[str, float]]:
    """Rewards, corrections and advantages of a whole batch, and their metrics."""
    metrics = _mismatch(batch)
    if settings.rewards is not None:
        batch = shape_batch_rewards(batch, settings.rewards, num_repeat=settings.arguments["num_repeat"])
    if settings.kl_penalty is None:
        batch = rewards_from_scores(batch)
    else:
        batch, kl_metrics = apply_kl_penalty(batch, controller, kl_penalty=settings.kl_penalty)
        metrics |= kl_metrics
    if settings.correction is not None:
        batch, correction_metrics = apply_rollout_correction(batch, settings.correction)
        metrics |= correction_metrics
    seed = settings.loss_params.seed + int(batch.meta_info.get("global_steps", 0))
    batch = compute_advantage(batch, estimator=settings.estimator, seed=seed, **settings.arguments)
    batch = add_selected_tokens(batch, loss_mode=settings.loss_mode, params=settings.loss_params)
    return batch, metrics


def _mismatch(batch: DataProto) -> dict[str, float]:
    """How far the rollout's log-probs are from the trainer's, where the batch has both."""
    rows = batch.tensors
    if not {"rollout_log_probs", "old_log_probs"} <= set(rows.keys()):
        return {}
    return probs_diff_metrics(
        old_log_probs=rows["old_log_probs"],
        rollout_log_probs=rows["rollout_log_probs"],
        response_mask=rows["response_mask"],
    )


def rollout_correction(cfg: PPOConfig) -> RolloutCorrection | None:
    """The rollout correction, or None where nothing is corrected."""
    wanted = cfg.algorithm.rollout_correction
    if wanted.rollout_is is None and wanted.rollout_rs is None and not wanted.bypass_mode:
        return None
    return RolloutCorrection(
        rollout_is=wanted.rollout_is,
        rollout_is_threshold=wanted.rollout_is_threshold,
        rollout_rs=wanted.rollout_rs,
        rollout_rs_threshold=wanted.rollout_rs_threshold,
        rollout_is_batch_normalize=wanted.rollout_is_batch_normalize,
        bypass_mode=wanted.bypass_mode,
        loss_type=wanted.loss_type,
    )


def _resampling(algorithm: AlgorithmConfig) -> PFPPO | None:
    if not algorithm.use_pf_ppo:
        return None
    return PFPPO(reweight_method=algorithm.pf_ppo.reweight_method, weight_pow=algorithm.pf_ppo.weight_pow)


def _norm(norm: NormConfig) -> NormSettings | None:
    if norm.mean_level is None and norm.std_level is None:
        return None
    return NormSettings(
        mean_level=norm.mean_level,
        std_level=norm.std_level,
        mean_leave1out=norm.mean_leave1out,
        std_unbiased=norm.std_unbiased,
        eps=norm.eps,
    )


def _reward_settings(cfg: PPOConfig) -> RewardSettings | None:
    """AReaL's reward stage, or None where every setting has its neutral default."""
    knobs, norm = cfg.algorithm, _norm(cfg.algorithm.reward_norm)
    at_rest = knobs.reward_bias == 0.0 and knobs.reward_scaling == 1.0 and knobs.reward_clip is None
    if at_rest and norm is None and not knobs.mask_no_eos_with_zero:
        return None
    return RewardSettings(
        reward_bias=knobs.reward_bias,
        reward_scaling=knobs.reward_scaling,
        reward_clip=float("inf") if knobs.reward_clip is None else knobs.reward_clip,
        reward_norm=norm,
        mask_no_eos_with_zero=knobs.mask_no_eos_with_zero,
    )
