"""From scores to advantages, as configured: reward shaping, KL penalty, rollout correction, estimator."""

from __future__ import annotations

from rlsys.algorithms.kl import KLController
from rlsys.algorithms.mismatch import probs_diff_metrics
from rlsys.algorithms.stages import (
    add_selected_tokens,
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantage,
    rewards_from_scores,
    shape_batch_rewards,
)
from rlsys.config import PPOConfig
from rlsys.protocol import DataProto


def rewards_to_advantages(
    batch: DataProto, cfg: PPOConfig, controller: KLController
) -> tuple[DataProto, dict[str, float]]:
    """Rewards, corrections and advantages of a whole batch, and their metrics.

    `controller` holds the weight of the KL penalty in the reward, which this updates.
    """
    algorithm, actor, rollout_n = cfg.algorithm, cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.n
    metrics = _mismatch(batch)
    batch = shape_batch_rewards(batch, algorithm, num_repeat=rollout_n)
    if algorithm.use_kl_in_reward:
        batch, kl_metrics = apply_kl_penalty(batch, controller, kl_penalty=algorithm.kl_penalty)
        metrics |= kl_metrics
    else:
        batch = rewards_from_scores(batch)
    batch, correction_metrics = apply_rollout_correction(batch, algorithm.rollout_correction)
    metrics |= correction_metrics
    seed = actor.data_loader_seed
    step = int(batch.meta_info.get("global_steps", 0))
    batch = compute_advantage(batch, algorithm, num_repeat=rollout_n, seed=seed + step)
    return add_selected_tokens(batch, actor, seed=seed), metrics


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
