"""Policy losses: what an actor minimises, per response token.

b rows of a micro-batch, R response tokens. A loss takes keyword arguments out of `PolicyInputs`: log-probabilities
under the trained policy and under the one that is fixed for the update, advantages, the mask (all (b, R)) and the
actor's section of the configuration. It returns a loss per token, which `aggregate.agg_loss` reduces to a sum and a
count. A plug-in:

    @register_policy_loss("mine")
    def mine(*, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> PolicyLoss: ...

One written for verl, with the argument `loss_agg_mode`, runs unchanged: see `adapt_verl_loss`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from rlsys.algorithms.masked import TensorSums, masked_mean, masked_sum
from rlsys.algorithms.registry import Registry, SectionView
from rlsys.config.schema.actor import ActorConfig
from rlsys.config.schema.algorithm import RolloutCorrectionConfig

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per token (b, R), the tokens it is summed over, and metrics as (sum, count).

    `mask` may be smaller than the response mask (rejected tokens); the count stays that of the response mask.
    Losses that are defined for one aggregation only set `agg_mode`; those that aggregate themselves set `mean`, the
    quotient of sum and count.
    """

    per_token: Tensor
    mask: Tensor
    metrics: TensorSums = field(default_factory=dict)
    agg_mode: str | None = None
    mean: Tensor | None = None


PolicyLossFn = Callable[..., PolicyLoss]


class PolicyInputs(TypedDict, total=False):
    """What a policy loss may take: tensors (b, R) and sections of the configuration."""

    log_prob: Required[Tensor]
    old_log_prob: Required[Tensor]
    advantages: Required[Tensor]
    response_mask: Required[Tensor]
    config: ActorConfig
    rollout_is_weights: Tensor | None
    rollout_correction: RolloutCorrectionConfig | None
    selected: Tensor | None


def adapt_verl_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of verl's form as one of ours; other functions unchanged.

    It takes old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config and rollout_is_weights, and
    returns the loss of these rows and a dict of metrics, or in verl's older form the loss, pg_clipfrac, ppo_kl and
    pg_clipfrac_lower. Metrics are averaged by tokens. ValueError for `token-sum`, which has no mean.
    """
    if "loss_agg_mode" not in inspect.signature(function).parameters:
        return function

    def verl_loss(
        *,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        config: ActorConfig,
        rollout_is_weights: Tensor | None = None,
    ) -> PolicyLoss:
        if config.loss_agg_mode == "token-sum":
            raise ValueError(f"the policy loss {function.__name__} of verl's form has no loss_agg_mode=token-sum")
        weights = {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
        mean, *rest = function(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=config.loss_agg_mode,
            config=SectionView(config),
            **weights,
        )
        names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
        metrics = rest[0] if len(rest) == 1 else dict(zip(names, rest, strict=True))
        tokens = response_mask.bool().sum().double()
        pairs = {name: (tokens * torch.as_tensor(value).detach(), tokens) for name, value in metrics.items()}
        return PolicyLoss(torch.zeros_like(log_prob), response_mask, pairs, mean=mean)

    return verl_loss


_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", takes=PolicyInputs.__annotations__, adapt=adapt_verl_loss)


register_policy_loss = _LOSSES.register
"""Decorator that makes a loss available as `actor.policy_loss.loss_mode=NAME`."""
get_policy_loss_fn = _LOSSES.get
"""The loss of a name; ValueError with the nearest known name otherwise."""


def call_policy_loss(name: str, **inputs: Unpack[PolicyInputs]) -> PolicyLoss:
    """Call a loss by name with those of the inputs that it takes.

    `rollout_is_weights` (b, R) multiply the loss per token, unless the loss takes them itself. With weights proximal /
    behaviour that is decoupled PPO (arXiv:2110.00641, arXiv:2505.24298).
    """
    loss: PolicyLoss = _LOSSES.call(name, inputs)
    weights = inputs.get("rollout_is_weights")
    if weights is None or "rollout_is_weights" in inspect.signature(get_policy_loss_fn(name)).parameters:
        return loss
    return replace(loss, per_token=loss.per_token * weights)


def over_tokens(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the tokens in the mask as (sum, count), without gradient."""
    return masked_sum(values.detach().double(), mask), mask.bool().sum()


def clamped_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log(policy / old policy), clamped to +-20 so that its exponential stays finite."""
    return (log_prob - old_log_prob).clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """PPO's two surrogates: `-A r` and `-A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)`."""
    return -advantages * ratio, -advantages * _clip(ratio, config)


def _clip(ratio: Tensor, config: ActorConfig) -> Tensor:
    return ratio.clamp(min=1 - config.clip_ratio_low, max=1 + config.clip_ratio_high)


def _metrics(log_ratio: Tensor, mask: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None) -> TensorSums:
    none = torch.zeros_like(mask, dtype=torch.bool)
    return {
        "actor/pg_clipfrac": over_tokens(none if clipped is None else clipped, mask),
        "actor/ppo_kl": over_tokens(-log_ratio, mask),
        "actor/pg_clipfrac_lower": over_tokens(none if lower is None else lower, mask),
    }


@register_policy_loss("vanilla")
def vanilla(
    *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """PPO: `max(-A r, -A clip(r, 1 - low, 1 + high))`, r the ratio (arXiv:1707.06347, eq. 7).

    For A < 0 it is at most `-A clip_ratio_c` (dual clip, arXiv:1912.09729); unequal bounds are DAPO's clip-higher
    (arXiv:2503.14476).
    """
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    unclipped, clipped = clipped_surrogate(log_ratio.exp(), advantages, config)
    upper = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    negative = advantages < 0
    per_token = torch.where(negative, torch.minimum(upper, bound), upper)
    metrics = _metrics(log_ratio, response_mask, clipped > unclipped, (upper > bound) & negative)
    return PolicyLoss(per_token, response_mask, metrics)


@register_policy_loss("gspo")
def gspo(
    *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """GSPO-token (arXiv:2507.18071): PPO's clip on the geometric mean of a row's ratios, gradient by token.

    `s[t] = sg(s) pi[t] / sg(pi[t])`, `log s = mean_t log r[t]`. A job averages it by seq-mean-token-mean
    unless `loss_agg_mode` is set.
    """
    log_ratio = log_prob - old_log_prob
    log_weight = log_prob - log_prob.detach() + masked_mean(log_ratio, response_mask, dim=1).detach().unsqueeze(1)
    unclipped, clipped = clipped_surrogate(log_weight.clamp(max=10.0).exp(), advantages, config)
    metrics = _metrics(log_ratio, response_mask, clipped > unclipped)
    return PolicyLoss(torch.maximum(unclipped, clipped), response_mask, metrics)


@register_policy_loss("cispo")
def cispo(
    *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """CISPO (arXiv:2506.13585): `-sg(clip(r, 1 - low, 1 + high)) A log pi`, so that clipped tokens keep a gradient."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    clipped = _clip(ratio, config)
    per_token = -clipped.detach() * advantages * log_prob
    return PolicyLoss(per_token, response_mask, _metrics(log_ratio, response_mask, clipped != ratio))


@register_policy_loss("sapo")
def sapo(
    *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """SAPO (arXiv:2511.20347): `-A 4 / tau sigmoid(tau (r - 1))`, tau by the sign of A; always seq-mean-token-mean."""
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg).to(log_prob.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    return PolicyLoss(-gate * advantages, response_mask, _metrics(log_ratio, response_mask), "seq-mean-token-mean")


@register_policy_loss("gpg")
def gpg(*, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> PolicyLoss:
    """GPG (arXiv:2504.02546): the plain policy gradient, `-A log pi`."""
    return PolicyLoss(-log_prob * advantages, response_mask, _metrics(log_prob - old_log_prob, response_mask))


@register_policy_loss("geo_mean")
def geo_mean(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """GMPO (arXiv:2507.20673): `-A exp(mean_t clip(log r[t], -low, high))`, clipped pessimistically, by row.

    A is the row's mean advantage; importance weights enter by their geometric mean. Always seq-mean-token-mean, with
    the loss of a row repeated at each of its tokens.
    """
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    clipped = log_ratio.clamp(min=-config.clip_ratio_low, max=config.clip_ratio_high)
    sign = torch.sign(advantages)
    ratio = masked_mean(sign * torch.minimum(sign * log_ratio, sign * clipped), response_mask, dim=1).exp()
    row = -masked_mean(advantages, response_mask, dim=1) * ratio
    if rollout_is_weights is not None:
        row = row * masked_mean((rollout_is_weights + 1e-10).log(), response_mask, dim=1).exp()
    outside = log_ratio != clipped
    metrics = _metrics(log_ratio, response_mask, outside & (advantages > 0), outside & (advantages < 0))
    return PolicyLoss(row.unsqueeze(1).expand_as(log_prob), response_mask, metrics, "seq-mean-token-mean")


@register_policy_loss("dro")
def dro(
    *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """DRO (arXiv:2405.19107): `-(A log pi - beta / 2 (log r)^2)`, a quadratic penalty instead of a clip.

    ValueError without `policy_loss.dro_beta`.
    """
    log_ratio = log_prob - old_log_prob
    if config.policy_loss.dro_beta is None:
        raise ValueError("policy_loss.loss_mode=dro needs policy_loss.dro_beta, the weight of the squared log-ratio")
    per_token = -(log_prob * advantages - 0.5 * config.policy_loss.dro_beta * log_ratio.square())
    return PolicyLoss(per_token, response_mask, _metrics(log_ratio, response_mask))


@register_policy_loss("dppo_tv")
def dppo_tv(
    *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """DPPO-Binary-TV (arXiv:2602.04879): drop tokens whose probability moved by more than `high` (A > 0) or `-low`."""
    change = (log_prob.exp() - old_log_prob.exp()).detach()
    valid = torch.where(advantages > 0, change <= config.clip_ratio_high, change >= -config.clip_ratio_low)
    return _dppo(log_prob, old_log_prob, advantages, response_mask, config, valid)


@register_policy_loss("dppo_kl")
def dppo_kl(
    *, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """DPPO-Binary-KL (arXiv:2602.04879): as dppo_tv, with the KL of (this token, any other) as the distance."""
    new, old = log_prob.detach().exp(), old_log_prob.exp()
    distance = old * (old_log_prob - log_prob.detach()) + (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    rising = (distance <= config.clip_ratio_high) | (new <= old)
    valid = torch.where(advantages > 0, rising, (distance <= config.clip_ratio_low) | (new >= old))
    return _dppo(log_prob, old_log_prob, advantages, response_mask, config, valid)


def _dppo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig, valid: Tensor
) -> PolicyLoss:
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.detach().exp()
    per_token = -advantages * ratio.clamp(max=config.clip_ratio_c) * log_prob * valid
    return PolicyLoss(per_token, mask, _metrics(log_ratio, mask, ~valid, (ratio > config.clip_ratio_c) & valid))


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
    """Clip-Cov (arXiv:2505.22617): PPO's clipped loss without the selected tokens, those that drive entropy down: a
    random share of those with a covariance in (lb, ub).

    `selected` (b, R) is their mask, see `select_tokens`; by default they are drawn from these rows.
    """
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    unclipped, clipped = clipped_surrogate(log_ratio.exp(), advantages, config)
    if selected is None:
        eligible = response_mask.bool() & (clipped <= unclipped)
        selected = _draw_clipped(log_prob, advantages, response_mask, config, eligible, config.data_loader_seed)
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
    """KL-Cov (arXiv:2505.22617): `-A r`, plus `ppo_kl_coef |log r|` at the selected tokens, the share with the largest
    covariance.

    `selected` (b, R) is their mask, see `select_tokens`; by default they are taken from these rows.
    """
    log_ratio = clamped_log_ratio(log_prob, old_log_prob)
    if selected is None:
        selected = _largest_covariance(log_prob, advantages, response_mask, config)
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
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask)).detach()


def _draw_clipped(
    log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig, eligible: Tensor, seed: int
) -> Tensor:
    loss, covariance = config.policy_loss, _covariance(log_prob, advantages, mask)
    eligible = eligible & (covariance > loss.clip_cov_lb) & (covariance < loss.clip_cov_ub)
    candidates = eligible.flatten().nonzero().squeeze(1)
    num_selected = max(int(loss.clip_cov_ratio * int(mask.bool().sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:num_selected]
    return _mask_of(candidates[order.to(candidates.device)], mask)


def _largest_covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig) -> Tensor:
    num_tokens = int(mask.bool().sum())
    covariance = _covariance(log_prob, advantages, mask).masked_fill(~mask.bool(), -torch.inf)
    num_selected = max(int(num_tokens * config.policy_loss.kl_cov_ratio), 1)
    return _mask_of(covariance.flatten().topk(min(num_selected, num_tokens)).indices, mask)


def _mask_of(tokens: Tensor, like: Tensor) -> Tensor:
    """The mask of tokens, by their places in a flattened mask (b, R)."""
    return torch.zeros(like.numel(), dtype=torch.bool, device=like.device).index_fill(0, tokens, True).view_as(like)
