"""Bypass mode: the rollout's log-probabilities stand for the old policy, and correction happens inside the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsys.algorithms.correction import importance_weights, rejection_mask
from rlsys.algorithms.policy_loss import PolicyLoss, over_tokens, register_policy_loss, vanilla
from rlsys.config.schema.actor import ActorConfig
from rlsys.config.schema.algorithm import RolloutCorrectionConfig


@register_policy_loss("bypass_mode")
def bypass_mode(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
    rollout_correction: RolloutCorrectionConfig | None = None,
) -> PolicyLoss:
    """The loss against the rollout policy itself: `old_log_prob` must be the rollout's log-probabilities.

    `loss_type=ppo_clip`: PPO's clip on policy / rollout. `reinforce`: `-sg(w) A log pi` with the importance weights w
    of `rollout_correction` (1 without `rollout_is`). Rejection removes tokens from the sum, not from the count.
    `rollout_is_weights` are not used: the weights are those of the current policy. ValueError for
    rollout_is_batch_normalize with `reinforce`: the mean of weights that change with every update is not known when
    a micro-batch is computed.
    """
    correction = rollout_correction or RolloutCorrectionConfig()
    log_ratio = torch.where(response_mask.bool(), (log_prob - old_log_prob).detach(), 0.0)
    kept, _ = rejection_mask(log_ratio, response_mask, correction)
    metrics = {
        "rollout_corr/kl": over_tokens(-log_ratio, response_mask),
        "rollout_corr/k3_kl": over_tokens(log_ratio.exp() - log_ratio - 1, response_mask),
        "rollout_corr/rollout_rs_masked_fraction": over_tokens(kept != response_mask, response_mask),
    }
    if correction.loss_type == "ppo_clip":
        clipped = vanilla(
            log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, response_mask=kept, config=config
        )
        return PolicyLoss(clipped.per_token, kept, {**clipped.metrics, **metrics})
    if correction.rollout_is_batch_normalize:
        raise ValueError(
            "rollout_is_batch_normalize does not work with bypass_mode and loss_type=reinforce; disable it"
        )
    per_token = -advantages * log_prob
    if correction.rollout_is is not None:
        weights, _ = importance_weights(log_ratio, response_mask, correction)
        per_token = per_token * weights
        metrics["rollout_corr/rollout_is_mean"] = over_tokens(weights, response_mask)
    return PolicyLoss(per_token, kept, {"actor/ppo_kl": over_tokens(-log_ratio, kept), **metrics})
