"""Clip-Cov and KL-Cov (arXiv:2505.22617): restrain the few tokens that drive entropy down, by their covariance."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlsys.algorithms.masked import masked_mean
from rlsys.algorithms.policy_loss import (
    PolicyLoss,
    PolicyLossParams,
    log_ratio_of,
    over_tokens,
    register_policy_loss,
    weighted,
)


@register_policy_loss("clip_cov")
def clip_cov(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
    selected: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped loss without the selected tokens, a random share of those with a covariance in (lb, ub).

    `selected` (b, R) names them beforehand, see `select_tokens`; else they are drawn from these rows.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(min=1 - params.low, max=1 + params.high)
    if selected is None:
        excluded = held > plain
        selected = _draw_clipped(log_prob.detach(), advantages, response_mask, params, excluded)
    dropped = selected.bool()
    metrics = {
        "actor/pg_clipfrac": over_tokens(dropped, response_mask),
        "actor/ppo_kl": over_tokens(-log_ratio, response_mask),
    }
    per_token = torch.maximum(plain, held).masked_fill(dropped, 0.0)
    return PolicyLoss(weighted(per_token, rollout_is_weights), response_mask, metrics)


@register_policy_loss("kl_cov")
def kl_cov(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
    selected: Tensor | None = None,
) -> PolicyLoss:
    """`-A r`, plus `ppo_kl_coef |log r|` at the selected tokens, the share with the largest covariance.

    `selected` (b, R) names them beforehand, see `select_tokens`; else they are taken from these rows.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    if selected is None:
        selected = _largest_covariance(log_prob.detach(), advantages, response_mask, params)
    penalty = params.ppo_kl_coef * log_ratio.abs()
    per_token = -advantages * log_ratio.exp() + torch.where(selected.bool(), penalty, torch.zeros_like(penalty))
    metrics = {"actor/ppo_kl": over_tokens(log_ratio.abs(), response_mask)}
    return PolicyLoss(weighted(per_token, rollout_is_weights), response_mask, metrics)


@torch.no_grad()
def select_tokens(
    *, loss_mode: str, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, params: PolicyLossParams
) -> Tensor | None:
    """The tokens (B, R) that clip_cov or kl_cov restrain, chosen once for all of these rows; None for other losses.

    Chosen under the old policy, the choice does not depend on how the rows are split afterwards.
    """
    if loss_mode == "clip_cov":
        return _draw_clipped(old_log_probs, advantages, response_mask, params, torch.zeros_like(response_mask))
    if loss_mode == "kl_cov":
        return _largest_covariance(old_log_probs, advantages, response_mask, params)
    return None


def with_seed(params: PolicyLossParams, step: int) -> PolicyLossParams:
    """The same params with the draw of clip_cov moved on to optimizer step `step`."""
    return replace(params, seed=params.seed * 1_000_003 + step)


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def _draw_clipped(
    log_prob: Tensor, advantages: Tensor, mask: Tensor, params: PolicyLossParams, excluded: Tensor
) -> Tensor:
    covariance = _covariance(log_prob, advantages, mask)
    eligible = (covariance > params.clip_cov_lb) & (covariance < params.clip_cov_ub) & mask.bool() & ~excluded.bool()
    candidates = eligible.flatten().nonzero().squeeze(1)
    wanted = max(int(params.clip_cov_ratio * int(mask.bool().sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(params.seed))[:wanted]
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[candidates[order.to(candidates.device)]] = True
    return chosen.view_as(mask)


def _largest_covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor, params: PolicyLossParams) -> Tensor:
    num_tokens = int(mask.bool().sum())
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    if num_tokens:
        covariance = _covariance(log_prob, advantages, mask).masked_fill(~mask.bool(), -torch.inf)
        wanted = max(int(num_tokens * params.kl_cov_ratio), 1)
        chosen[covariance.flatten().topk(min(wanted, num_tokens)).indices] = True
    return chosen.view_as(mask)
