"""Bypass mode: the rollout's log-probabilities stand for the old policy, and correction happens inside the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsys.algorithms.correction import RolloutCorrection, importance_weights, rejection_mask
from rlsys.algorithms.policy_loss import PolicyLoss, PolicyLossParams, over_tokens, register_policy_loss, vanilla
from rlsys.algorithms.sums import Sums


@register_policy_loss("bypass_mode")
def bypass_mode(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
) -> PolicyLoss:
    """The loss against the rollout policy itself: `old_log_prob` must be the rollout's log-probabilities.

    `loss_type=ppo_clip`: PPO's clip on policy / rollout. `reinforce`: `-sg(w) A log pi` with the importance weights w
    of `params.rollout_correction` (1 without `rollout_is`). Rejection takes tokens out of the sum, not of the count.
    """
    settings = params.rollout_correction or RolloutCorrection(bypass_mode=True)
    log_ratio = torch.where(response_mask.bool(), (log_prob - old_log_prob).detach(), 0.0)
    kept, _ = rejection_mask(log_ratio, response_mask, settings)
    metrics = {
        "rollout_corr/kl": over_tokens(-log_ratio, response_mask),
        "rollout_corr/k3_kl": over_tokens(log_ratio.exp() - log_ratio - 1, response_mask),
        "rollout_corr/rollout_rs_masked_fraction": over_tokens(kept != response_mask, response_mask),
    }
    if settings.loss_type == "ppo_clip":
        clipped = vanilla(
            log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, response_mask=kept, params=params
        )
        return PolicyLoss(clipped.per_token, kept, {**clipped.metrics, **metrics})
    per_token = -advantages * log_prob
    if settings.rollout_is is not None:
        weights, _ = importance_weights(log_ratio, response_mask, settings)
        per_token = per_token * weights
        metrics["rollout_corr/rollout_is_mean"] = over_tokens(weights, response_mask)
    return PolicyLoss(per_token, kept, {**_kl(log_ratio, kept), **metrics})


def _kl(log_ratio: Tensor, mask: Tensor) -> Sums:
    return {"actor/ppo_kl": over_tokens(-log_ratio, mask)}
