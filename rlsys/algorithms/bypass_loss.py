"""Bypass mode: the rollout's log-probabilities stand for the old policy, and correction happens inside the loss."""

from dataclasses import replace

import torch
from torch import Tensor

from rlsys.algorithms.correction import rollout_correction as correct
from rlsys.algorithms.policy_loss import PolicyLoss, call_policy_loss, over_tokens, register_policy_loss
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
    selected: Tensor | None = None,
) -> PolicyLoss:
    """The loss against the rollout policy itself: `old_log_prob` must be the rollout's log-probabilities.

    `loss_type=ppo_clip`: the loss `policy_loss.loss_mode` on policy / rollout, by default PPO's clip. `reinforce`:
    `-sg(w) A log pi` with the importance weights w of `rollout_correction` (1 without `rollout_is`). Rejection removes
    tokens from the sum, not from the count. `rollout_is_weights` are not used: the weights are those of the current
    policy. Metrics are those of `rollout_correction` over these rows, weighted by their tokens.
    `rollout_is_batch_normalize` makes the mean of the weights over these rows 1.
    """
    correction = rollout_correction or RolloutCorrectionConfig()
    num_tokens = response_mask.bool().sum().double()
    mask = torch.where(num_tokens > 0, response_mask, torch.ones_like(response_mask))
    corrected = correct(old_log_probs=log_prob, rollout_log_probs=old_log_prob, response_mask=mask, config=correction)
    metrics = {name: (value * num_tokens, num_tokens) for name, value in corrected.values.items()}
    kept = corrected.response_mask * response_mask
    if correction.loss_type != "reinforce":
        mode = config.policy_loss.loss_mode
        clipped = call_policy_loss(
            "vanilla" if mode == "bypass_mode" else mode,
            log_prob=log_prob,
            old_log_prob=old_log_prob,
            advantages=advantages,
            response_mask=kept,
            config=config,
            selected=selected,
        )
        return replace(clipped, metrics={**clipped.metrics, **metrics})
    per_token = -advantages * log_prob * (1.0 if corrected.weights is None else corrected.weights)
    return PolicyLoss(per_token, kept, {"actor/ppo_kl": over_tokens(old_log_prob - log_prob, kept), **metrics})
