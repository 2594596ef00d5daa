"""Advantage estimators: how much better each response token is than expected.

B rows, R response tokens, K reward components. An estimator takes keyword-only tensors and numbers out of `INPUTS` and
returns (advantages, returns), both (B, R) in the dtype of the rewards and 0 outside `response_mask`. Rewards are
`token_level_rewards` (B, R); estimators of the outcome sum them by row. The arithmetic is in float64. A plug-in:

    @register_adv_est("mine")
    def mine(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> AdvantagesAndReturns: ...

One written for verl runs unchanged: `index` are the uids of the rows, `config` is the section `algorithm`.
"""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rlsys.algorithms.groups import group_count, group_mean, group_std, group_sum, rank_in_group, second_largest
from rlsys.algorithms.masked import masked_whiten
from rlsys.algorithms.registry import Registry
from rlsys.algorithms.scan import discounted_returns, pack, packed_columns, reverse_scan, unpack

EPSILON = 1e-6
"""Added to the deviation of a group."""
AdvantagesAndReturns = tuple[Tensor, Tensor]
Estimator = Callable[..., AdvantagesAndReturns]

INPUTS = frozenset(
    (
        *("token_level_rewards", "response_mask", "group_ids", "values", "reward_baselines", "component_scores"),
        *("component_weights", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "gamma", "lam"),
        *("norm_adv_by_std_in_grpo", "whiten", "index", "config"),
    )
)

_ESTIMATORS: Registry[Estimator] = Registry("advantage estimator", takes=INPUTS)


register_adv_est = _ESTIMATORS.register
"""Decorator that makes an estimator available as `algorithm.adv_estimator=NAME`."""
get_adv_estimator_fn = _ESTIMATORS.get
"""The estimator of a name; ValueError with the nearest known name otherwise."""
call_adv_estimator = _ESTIMATORS.call
"""Call an estimator by name with those of the inputs that it takes; ValueError naming what is missing."""


def estimator_takes(name: str) -> frozenset[str]:
    """The inputs that an estimator takes, e.g. to know whether it needs values, groups or sum_pi_squared."""
    return frozenset(inspect.signature(get_adv_estimator_fn(name)).parameters) & INPUTS


def _per_token(scores: Tensor, mask: Tensor, like: Tensor) -> AdvantagesAndReturns:
    """Row scores (B,) or (B, R) spread over the counting tokens, as advantages and, the same tensor, as returns."""
    scores = scores.unsqueeze(1) if scores.dim() == 1 else scores
    advantages = torch.where(mask.bool(), scores.to(like.dtype), 0.0)
    return advantages, advantages


def _outcome(rewards: Tensor) -> Tensor:
    return rewards.sum(dim=1, dtype=torch.float64)


@register_adv_est("gae")
def gae(
    *,
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> AdvantagesAndReturns:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), whitened over the batch as in PPO implementations.

    `A[t] = d[t] + gamma * lam * A[t']`, `d[t] = r[t] + gamma * V[t'] - V[t]`, t' being the next counting token, so that
    observations in a multi-turn response are skipped. Returns are `A + V` before whitening.
    """
    _check_discount(gamma * lam)
    dtype, columns = token_level_rewards.dtype, packed_columns(response_mask)
    now = pack(values.double(), response_mask, columns)
    following = torch.nn.functional.pad(now[:, 1:], (0, 1))
    errors = pack(token_level_rewards.double(), response_mask, columns) + gamma * following - now
    packed = reverse_scan(errors, gamma * lam)
    returns = unpack(packed + now, response_mask, columns).to(dtype)
    advantages = unpack(packed, response_mask, columns)
    return masked_whiten(advantages, response_mask, dtype=dtype) if whiten else advantages.to(dtype), returns


def _check_discount(discount: float) -> None:
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"gamma and gamma * lam must be in [0, 1], got {discount}")


@register_adv_est("grpo", "grpo_vectorized")
def grpo(
    *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_adv_by_std_in_grpo: bool = True
) -> AdvantagesAndReturns:
    """GRPO (arXiv:2402.03300): the outcome minus its group's mean, divided by the group's deviation.

    Without the division it is Dr. GRPO (arXiv:2503.20783). A group of one keeps its outcome.
    """
    scores = _group_normalised(_outcome(token_level_rewards), group_ids, norm_adv_by_std_in_grpo)
    return _per_token(scores, response_mask, token_level_rewards)


def _group_normalised(scores: Tensor, group_ids: Tensor, by_std: bool) -> Tensor:
    centred = scores - group_mean(scores, group_ids)
    return centred / (group_std(scores, group_ids) + EPSILON) if by_std else centred


@register_adv_est("grpo_passk")
def grpo_passk(
    *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_adv_by_std_in_grpo: bool = True
) -> AdvantagesAndReturns:
    """Pass@k (arXiv:2503.19595): only the best response of a group counts, by its lead over the second.

    Divided by the group's deviation unless `norm_adv_by_std_in_grpo` is off. A group of one has no lead: 0.
    """
    scores = _outcome(token_level_rewards)
    lead = scores - second_largest(scores, group_ids)
    if norm_adv_by_std_in_grpo:
        lead = lead / (group_std(scores, group_ids) + EPSILON)
    best = rank_in_group(scores, group_ids) == 0
    return _per_token(torch.where(best, lead, torch.zeros_like(lead)), response_mask, token_level_rewards)


@register_adv_est("rloo")
def rloo(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> AdvantagesAndReturns:
    """REINFORCE leave-one-out (arXiv:2402.14740): the outcome minus the mean of the others in its group.

    A group of one keeps its outcome.
    """
    scores = _outcome(token_level_rewards)
    lead = torch.where(group_count(group_ids)[group_ids] == 1, scores, _leave_one_out(scores, group_ids))
    return _per_token(lead, response_mask, token_level_rewards)


@register_adv_est("rloo_vectorized")
def rloo_vectorized(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> AdvantagesAndReturns:
    """As `rloo`, but a group of one gives 0."""
    return _per_token(_leave_one_out(_outcome(token_level_rewards), group_ids), response_mask, token_level_rewards)


def _leave_one_out(scores: Tensor, group_ids: Tensor) -> Tensor:
    count = group_count(group_ids)[group_ids]
    return (count * scores - group_sum(scores, group_ids)[group_ids]) / (count - 1).clamp(min=1)


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    *, token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0, whiten: bool = True
) -> AdvantagesAndReturns:
    """REINFORCE++ (arXiv:2501.03262): the discounted return of each token, whitened over the batch."""
    _check_discount(gamma)
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    advantages = masked_whiten(returns, response_mask) if whiten else returns
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, whiten: bool = True
) -> AdvantagesAndReturns:
    """REINFORCE++ with baseline (arXiv:2501.03262): minus the group's mean, then whitened over the batch."""
    scores = _outcome(token_level_rewards)
    centred = (scores - group_mean(scores, group_ids)).unsqueeze(1).expand_as(response_mask)
    return _per_token(masked_whiten(centred, response_mask) if whiten else centred, response_mask, token_level_rewards)


@register_adv_est("remax")
def remax(*, token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor) -> AdvantagesAndReturns:
    """ReMax (arXiv:2310.10505): the return minus the reward of the greedy response (B,)."""
    returns = discounted_returns(token_level_rewards, response_mask, 1.0)
    advantages = torch.where(response_mask.bool(), returns - reward_baselines.double().unsqueeze(1), 0.0)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


@register_adv_est("opo")
def opo(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> AdvantagesAndReturns:
    """OPO (arXiv:2505.23585): the outcome minus the length-weighted mean outcome of its group.

    A group of one keeps its outcome, as does one whose responses are all empty.
    """
    scores = _outcome(token_level_rewards)
    length = response_mask.bool().sum(dim=1).double()
    baseline = group_mean(length * scores, group_ids) / group_mean(length, group_ids).clamp(min=1e-9)
    return _per_token(scores - baseline, response_mask, token_level_rewards)


@register_adv_est("gpg")
def gpg(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> AdvantagesAndReturns:
    """GPG (arXiv:2504.02546): minus the group's mean, times rows / rows with a non-zero outcome."""
    scores = _outcome(token_level_rewards)
    alpha = len(scores) / torch.count_nonzero(scores).clamp(min=1)
    return _per_token(alpha * (scores - group_mean(scores, group_ids)), response_mask, token_level_rewards)


@register_adv_est("gdpo")
def gdpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    component_scores: Tensor,
    component_weights: Tensor | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    whiten: bool = True,
) -> AdvantagesAndReturns:
    """GDPO (arXiv:2601.05242): each reward component (B, K) normalised in its group, weighted, summed, whitened.

    `component_weights` is (K,), all 1 by default.
    """
    parts = [_group_normalised(part, group_ids, norm_adv_by_std_in_grpo) for part in component_scores.double().T]
    if component_weights is None:
        component_weights = torch.ones(len(parts), dtype=torch.float64, device=component_scores.device)
    summed = (torch.stack(parts, dim=1) @ component_weights.double()).unsqueeze(1).expand_as(response_mask)
    return _per_token(masked_whiten(summed, response_mask) if whiten else summed, response_mask, token_level_rewards)


@register_adv_est("optimal_token_baseline")
def optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    by_generated_tokens: bool = False,
) -> AdvantagesAndReturns:
    """Optimal token baseline: the return minus `B[t] = sum(G[t] W[t]) / sum(W[t])` over the group at the same column.

    `W[t]` is the path variance so far: the sum up to t of `1 - 2 pi + sum(pi^2)`, times the squared importance weight
    where one is given ("The optimal token baseline", arXiv:2602.07078). A group of one has no baseline; with
    `handle_zero_tail` neither has the part of the longest response beyond the second longest. For multi-turn rows
    `by_generated_tokens` aligns tokens by how many the model generated before.
    """
    returns = discounted_returns(token_level_rewards, response_mask, 1.0)
    variance = 1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()
    if rollout_is_weights is not None:
        variance = variance * rollout_is_weights.double().square()
    energy = torch.where(response_mask.bool(), variance, 0.0).cumsum(dim=1)
    columns = packed_columns(response_mask) if by_generated_tokens else None
    packed, energy, mask = (pack(table, response_mask, columns) for table in (returns, energy, response_mask))
    baseline = _token_baseline(packed, energy, mask, group_ids, handle_zero_tail)
    advantages = unpack(packed - baseline, response_mask, columns)
    return advantages.to(token_level_rewards.dtype), returns.to(token_level_rewards.dtype)


register_adv_est("tir_optimal_token_baseline")(partial(optimal_token_baseline, by_generated_tokens=True))


def _token_baseline(returns: Tensor, energy: Tensor, mask: Tensor, group_ids: Tensor, handle_zero_tail: bool) -> Tensor:
    baseline = (group_sum(returns * energy, group_ids) / (group_sum(energy, group_ids) + 1e-8))[group_ids]
    baseline = baseline * (group_count(group_ids) > 1)[group_ids].unsqueeze(1)
    if not handle_zero_tail:
        return baseline
    length = mask.bool().sum(dim=1)
    second = second_largest(length, group_ids)
    columns = torch.arange(mask.shape[1], device=mask.device)
    return baseline.masked_fill((length > second).unsqueeze(1) & (columns >= second.unsqueeze(1)), 0.0)
