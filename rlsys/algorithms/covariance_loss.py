"""Clip-Cov and KL-Cov (arXiv:2505.22617): restrain the few tokens that drive entropy down, by their covariance."""

import torch
from torch import Tensor

from rlsys.algorithms.masked import masked_mean
from rlsys.algorithms.policy_loss import (
    PolicyLoss,
    clamped_log_ratio,
    clipped_surrogate,
    over_tokens,
    register_policy_loss,
)
from rlsys.config.schema.actor import ActorConfig


@register_policy_loss("clip_cov")
def clip_cov(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    selected: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped loss without the selected tokens, a random share of those with a covariance in (lb, ub).

    `selected` (b, R) is their mask, see `select_tokens`; by default they are drawn from these rows.
    """
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    unclipped, clipped = clipped_surrogate(log_ratio.exp(), advantages, config)
    if selected is None:
        eligible = response_mask.bool() & (clipped <= unclipped)
        selected = _draw_clipped(
            log_prob.detach(), advantages, response_mask, config, eligible, config.data_loader_seed
        )
    dropped = selected.bool()
    metrics = {
        "actor/pg_clipfrac": over_tokens(dropped, response_mask),
        "actor/ppo_kl": over_tokens(-log_ratio, response_mask),
    }
    return PolicyLoss(torch.maximum(unclipped, clipped).masked_fill(dropped, 0.0), response_mask, metrics)


@register_policy_loss("kl_cov")
def kl_cov(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    selected: Tensor | None = None,
) -> PolicyLoss:
    """`-A r`, plus `ppo_kl_coef |log r|` at the selected tokens, the share with the largest covariance.

    `selected` (b, R) is their mask, see `select_tokens`; by default they are taken from these rows.
    """
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    if selected is None:
        selected = _largest_covariance(log_prob.detach(), advantages, response_mask, config)
    penalty = config.policy_loss.ppo_kl_coef * log_ratio.abs()
    per_token = -advantages * log_ratio.exp() + torch.where(selected.bool(), penalty, torch.zeros_like(penalty))
    return PolicyLoss(per_token, response_mask, {"actor/ppo_kl": over_tokens(log_ratio.abs(), response_mask)})


@torch.no_grad()
def select_tokens(
    config: ActorConfig, *, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, seed: int
) -> Tensor | None:
    """Mask (B, R) of the tokens that clip_cov or kl_cov restrain, chosen over all rows; None for other losses.

    The choice uses the old policy, so it does not depend on how the rows are split afterwards. `seed` is that of
    clip_cov's draw.
    """
    if config.policy_loss.loss_mode == "clip_cov":
        return _draw_clipped(old_log_probs, advantages, response_mask, config, response_mask.bool(), seed)
    if config.policy_loss.loss_mode == "kl_cov":
        return _largest_covariance(old_log_probs, advantages, response_mask, config)
    return None


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def _draw_clipped(
    log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig, eligible: Tensor, seed: int
) -> Tensor:
    loss, covariance = config.policy_loss, _covariance(log_prob, advantages, mask)
    eligible = eligible & (covariance > loss.clip_cov_lb) & (covariance < loss.clip_cov_ub)
    candidates = eligible.flatten().nonzero().squeeze(1)
    num_selected = max(int(loss.clip_cov_ratio * int(mask.bool().sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:num_selected]
    selected = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    selected[candidates[order.to(candidates.device)]] = True
    return selected.view_as(mask)


def _largest_covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig) -> Tensor:
    num_tokens = int(mask.bool().sum())
    selected = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    if num_tokens:
        covariance = _covariance(log_prob, advantages, mask).masked_fill(~mask.bool(), -torch.inf)
        num_selected = max(int(num_tokens * config.policy_loss.kl_cov_ratio), 1)
        selected[covariance.flatten().topk(min(num_selected, num_tokens)).indices] = True
    return selected.view_as(mask)
