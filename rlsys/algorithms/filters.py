"""Filters for groups and rows, and the penalty on long responses."""

import torch
from torch import Tensor

from rlsys.algorithms.groups import group_count, num_groups
from rlsys.config.schema.algorithm import OverlongConfig, PFPPOConfig


def informative_groups(metric: Tensor, group_ids: Tensor) -> Tensor:
    """Rows (B,) bool of groups whose metric varies: DAPO's dynamic sampling (arXiv:2503.14476).

    Equal rewards give no advantage, so such groups teach nothing. A group of one is kept.
    """
    groups = num_groups(group_ids)
    low = metric.new_full((groups,), torch.inf).scatter_reduce(0, group_ids, metric, "amin")
    high = metric.new_full((groups,), -torch.inf).scatter_reduce(0, group_ids, metric, "amax")
    return ((high > low) | (group_count(group_ids) == 1))[group_ids]


def overlong_penalty(lengths: Tensor, config: OverlongConfig, *, max_length: int) -> Tensor:
    """DAPO's soft punishment (B,) (arXiv:2503.14476): 0 up to `max_length - len`, then falling linearly.

    It reaches `-penalty_factor` at `max_length` tokens.
    """
    return ((max_length - config.len - lengths.double()) / config.len * config.penalty_factor).clamp(max=0.0)


def pf_ppo_rows(scores: Tensor, config: PFPPOConfig, *, seed: int = 0) -> Tensor:
    """Row indices (B,) resampled with replacement by reward: policy filtration, PF-PPO (arXiv:2409.06957).

    `pow`: weight |score| ** weight_pow. `max_min`: only the best and the worst. `max_random`: 0.4 for the best, 0.1
    for the rest. The draw depends on `seed` alone.
    """
    best = scores == scores.max()
    if config.reweight_method == "pow":
        weights = scores.double().abs().pow(config.weight_pow)
    elif config.reweight_method == "max_min":
        weights = (best | (scores == scores.min())).double()
    else:
        weights = torch.where(best, 0.4, 0.1).double()
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights.cpu() + 1e-8, len(scores), replacement=True, generator=generator)
