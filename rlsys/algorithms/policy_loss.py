"""Policy losses: what an actor minimises, per response token.

b rows of a micro-batch, R response tokens. A loss takes keyword arguments out of `INPUTS`: log-probabilities under the
policy in training and under the one held fixed for the update, advantages, the mask (all (b, R)) and the numbers in
`PolicyLossParams`. It returns a loss per token, which `aggregate.agg_loss` makes a sum and a count. A plug-in:

    @register_policy_loss("mine")
    def mine(*, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> PolicyLoss: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsys.algorithms.correction import RolloutCorrection
from rlsys.algorithms.masked import masked_sum
from rlsys.algorithms.registry import Registry
from rlsys.algorithms.sums import Sums

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLossParams:
    """The numbers of all losses, with verl's names and defaults; each loss reads its own.

    `clip_ratio_low` and `clip_ratio_high` default to `clip_ratio`; `clip_ratio_c=inf` switches the dual clip off. For
    dppo_tv and dppo_kl they are bounds of the divergence. `rollout_correction` is for bypass_mode, `seed` for the
    draw of clip_cov.
    """

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    dro_beta: float = 1.0
    rollout_correction: RolloutCorrection | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c must be greater than 1, got {self.clip_ratio_c}")
        for name in ("clip_cov_ratio", "kl_cov_ratio", "tau_pos", "tau_neg", "dro_beta"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per token (b, R), the tokens it is summed over, and metrics as (sum, count).

    `mask` may be smaller than the response mask (rejected tokens); the count remains that of the response mask.
    `agg_mode` is set by losses which are defined for one aggregation only.
    """

    per_token: Tensor
    mask: Tensor
    metrics: Sums = field(default_factory=dict)
    agg_mode: str | None = None


PolicyLossFn = Callable[..., PolicyLoss]

INPUTS = frozenset(
    {"log_prob", "old_log_prob", "advantages", "response_mask", "params", "rollout_is_weights", "selected"}
)

_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", takes=INPUTS)


def register_policy_loss(*names: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that makes a loss available as `actor.policy_loss.loss_mode=NAME`."""
    return _LOSSES.register(*names)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The loss of that name; ValueError with the nearest known name otherwise."""
    return _LOSSES.get(name)


def policy_loss_names() -> list[str]:
    return _LOSSES.names()


def call_policy_loss(
    name: str,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
    selected: Tensor | None = None,
) -> PolicyLoss:
    """Call a loss by name with those of the arguments that it takes."""
    inputs = {
        "log_prob": log_prob,
        "old_log_prob": old_log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
        "params": params,
        "rollout_is_weights": rollout_is_weights,
        "selected": selected,
    }
    return _LOSSES.call(name, inputs)


def over_tokens(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the tokens in the mask as (sum, count), without gradient."""
    return masked_sum(values.detach().double(), mask), mask.bool().sum()


def log_ratio_of(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log(policy / old policy), held within 20 so that its exponential stays finite."""
    return (log_prob - old_log_prob).clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)


def weighted(per_token: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    return per_token if rollout_is_weights is None else per_token * rollout_is_weights


def _metrics(
    log_ratio: Tensor, mask: Tensor, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    none = torch.zeros_like(mask, dtype=torch.bool)
    return {
        "actor/pg_clipfrac": over_tokens(none if clipped is None else clipped, mask),
        "actor/ppo_kl": over_tokens(-log_ratio, mask),
        "actor/pg_clipfrac_lower": over_tokens(none if clipped_lower is None else clipped_lower, mask),
    }


@register_policy_loss("vanilla")
def vanilla(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """PPO: `max(-A r, -A clip(r, 1 - low, 1 + high))`, r the ratio (arXiv:1707.06347, eq. 7).

    For A < 0 it is at most `-A clip_ratio_c` (dual clip, arXiv:1912.09729); unequal bounds are DAPO's clip-higher
    (arXiv:2503.14476). With `rollout_is_weights` = proximal / behaviour it is decoupled PPO (arXiv:2110.00641,
    arXiv:2505.24298).
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(min=1 - params.low, max=1 + params.high)
    upper = torch.maximum(plain, held)
    bound = -advantages * params.clip_ratio_c
    negative = advantages < 0
    per_token = torch.where(negative, torch.minimum(upper, bound), upper)
    metrics = _metrics(log_ratio, response_mask, held > plain, (upper > bound) & negative)
    return PolicyLoss(weighted(per_token, rollout_is_weights), response_mask, metrics)


@register_policy_loss("gspo")
def gspo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """GSPO-token (arXiv:2507.18071): PPO's clip on the geometric mean of a row's ratios, gradient by token.

    `s[t] = sg(s) pi[t] / sg(pi[t])`, `log s = mean_t log r[t]`; meant for seq-mean-token-mean.
    """
    log_ratio = log_prob - old_log_prob
    length = response_mask.bool().sum(dim=1).clamp(min=1)
    row_mean = masked_sum(log_ratio, response_mask, dim=1) / length
    log_weight = log_prob - log_prob.detach() + row_mean.detach().unsqueeze(1)
    ratio = log_weight.clamp(max=10.0).exp()
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(min=1 - params.low, max=1 + params.high)
    metrics = _metrics(log_ratio, response_mask, held > plain)
    return PolicyLoss(weighted(torch.maximum(plain, held), rollout_is_weights), response_mask, metrics)


@register_policy_loss("cispo")
def cispo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """CISPO (arXiv:2506.13585): `-sg(clip(r, 1 - low, 1 + high)) A log pi`, so that clipped tokens keep a gradient."""
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    held = ratio.clamp(min=1 - params.low, max=1 + params.high)
    per_token = -held.detach() * advantages * log_prob
    metrics = _metrics(log_ratio, response_mask, held != ratio)
    return PolicyLoss(weighted(per_token, rollout_is_weights), response_mask, metrics)


@register_policy_loss("sapo")
def sapo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """SAPO (arXiv:2511.20347): `-A 4 / tau sigmoid(tau (r - 1))`, tau by the sign of A; always seq-mean-token-mean."""
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, params.tau_pos, params.tau_neg).to(log_prob.dtype)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    metrics = _metrics(log_ratio, response_mask)
    return PolicyLoss(weighted(-gate * advantages, rollout_is_weights), response_mask, metrics, "seq-mean-token-mean")


@register_policy_loss("gpg")
def gpg(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """GPG (arXiv:2504.02546): the plain policy gradient, `-A log pi`."""
    metrics = _metrics(log_prob - old_log_prob, response_mask)
    return PolicyLoss(weighted(-log_prob * advantages, rollout_is_weights), response_mask, metrics)


@register_policy_loss("geo_mean")
def geo_mean(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """GMPO (arXiv:2507.20673): `-A exp(mean_t clip(log r[t], -low, high))`, clipped pessimistically, by row.

    A is the row's mean advantage; importance weights enter by their geometric mean. Always seq-mean-token-mean, where
    the loss of a row stands at each of its tokens.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    held = log_ratio.clamp(min=-params.low, max=params.high)
    sign = torch.sign(advantages)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * held)
    length = response_mask.bool().sum(dim=1).clamp(min=1)
    ratio = (masked_sum(pessimistic, response_mask, dim=1) / length).exp()
    row = -masked_sum(advantages, response_mask, dim=1) / length * ratio
    if rollout_is_weights is not None:
        row = row * (masked_sum((rollout_is_weights + 1e-10).log(), response_mask, dim=1) / length).exp()
    clipped = log_ratio != held
    metrics = _metrics(log_ratio, response_mask, clipped & (advantages > 0), clipped & (advantages < 0))
    return PolicyLoss(row.unsqueeze(1).expand_as(log_prob), response_mask, metrics, "seq-mean-token-mean")


@register_policy_loss("dro")
def dro(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """DRO (arXiv:2405.19107): `-(A log pi - beta / 2 (log r)^2)`, a quadratic pull instead of a clip."""
    log_ratio = log_prob - old_log_prob
    per_token = -(log_prob * advantages - 0.5 * params.dro_beta * log_ratio.square())
    return PolicyLoss(weighted(per_token, rollout_is_weights), response_mask, _metrics(log_ratio, response_mask))


@register_policy_loss("dppo_tv")
def dppo_tv(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """DPPO-Binary-TV (arXiv:2602.04879): drop tokens whose probability moved by more than `high` (A > 0) or `-low`."""
    moved = (log_prob.exp() - old_log_prob.exp()).detach()
    valid = torch.where(advantages > 0, moved <= params.high, moved >= -params.low)
    return _dppo(log_prob, old_log_prob, advantages, response_mask, params, rollout_is_weights, valid)


@register_policy_loss("dppo_kl")
def dppo_kl(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLoss:
    """DPPO-Binary-KL (arXiv:2602.04879): as dppo_tv, with the KL of (this token, any other) as the distance."""
    new, old = log_prob.detach().exp(), old_log_prob.exp()
    rest = torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    distance = old * (old_log_prob - log_prob.detach()) + (1 - old) * rest
    rising = (distance <= params.high) | (new <= old)
    falling = (distance <= params.low) | (new >= old)
    valid = torch.where(advantages > 0, rising, falling)
    return _dppo(log_prob, old_log_prob, advantages, response_mask, params, rollout_is_weights, valid)


def _dppo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    params: PolicyLossParams,
    rollout_is_weights: Tensor | None,
    valid: Tensor,
) -> PolicyLoss:
    log_ratio = log_ratio_of(log_prob, old_log_prob)
    ratio = log_ratio.detach().exp()
    per_token = -advantages * ratio.clamp(max=params.clip_ratio_c) * log_prob * valid
    metrics = _metrics(log_ratio, mask, ~valid, (ratio > params.clip_ratio_c) & valid)
    return PolicyLoss(weighted(per_token, rollout_is_weights), mask, metrics)
