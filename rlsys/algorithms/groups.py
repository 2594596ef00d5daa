"""Statistics over the rows of one prompt, and AReaL's normalisation by them.

A group is named by an index: `group_ids` is int64 (B,) in 0..G-1.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlsys.config.schema.algorithm import NormConfig


def group_ids_of(uids: Sequence[object] | np.ndarray) -> Tensor:
    """Index of each row's group: equal uids, equal index. The rows of a group need not be neighbours."""
    _, inverse = np.unique(np.asarray(uids), return_inverse=True)
    return torch.from_numpy(inverse.astype(np.int64).reshape(-1))


def num_groups(group_ids: Tensor) -> int:
    """Number of groups G."""
    return int(group_ids.max()) + 1 if group_ids.numel() else 0


def group_sum(values: Tensor, group_ids: Tensor) -> Tensor:
    """Sum of rows by group: (B, ...) -> (G, ...)."""
    return values.new_zeros(num_groups(group_ids), *values.shape[1:]).index_add(0, group_ids, values)


def group_count(group_ids: Tensor) -> Tensor:
    """Number of rows of each group (G,), int64."""
    return torch.bincount(group_ids, minlength=num_groups(group_ids))


def group_mean(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Mean score of each row's group (B,); 0 for a group of one, which then keeps its own score as advantage."""
    count = group_count(group_ids)
    mean = group_sum(scores, group_ids) / count
    return torch.where(count > 1, mean, torch.zeros_like(mean))[group_ids]


def group_std(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Unbiased standard deviation of each row's group (B,); 1 for a group of one."""
    table, counted = scores.unsqueeze(1), torch.ones_like(scores).unsqueeze(1)
    mean = _mean(table, counted, group_ids, leave_one_out=False)
    return _deviation(table - mean, counted, group_ids, unbiased=True).squeeze(1)


def rank_in_group(values: Tensor, group_ids: Tensor) -> Tensor:
    """Rank of each row in its group by descending value (B,): 0 is the largest; ties are in row order."""
    by_value = torch.argsort(values, descending=True, stable=True)
    order = by_value[torch.argsort(group_ids[by_value], stable=True)]
    count = group_count(group_ids)
    starts = count.cumsum(0) - count
    ranks = torch.empty_like(group_ids)
    ranks[order] = torch.arange(len(order), device=order.device) - starts[group_ids[order]]
    return ranks


def second_largest(values: Tensor, group_ids: Tensor) -> Tensor:
    """Second largest value of each row's group (B,); the largest itself for a group of one."""
    chosen = rank_in_group(values, group_ids) == (group_count(group_ids).clamp(max=2) - 1)[group_ids]
    return group_sum(torch.where(chosen, values, torch.zeros_like(values)), group_ids)[group_ids]


@torch.no_grad()
def normalize(values: Tensor, config: NormConfig, *, group_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Values (B,), or (B, R) with a mask, minus a mean and divided by a deviation; 0 outside the mask.

    The deviation is about the mean that was subtracted (about 0 if none was), in float64, plus `eps`; it is 1 for a
    set of one element if `std_unbiased`, and the mean is 0 for one with `mean_leave1out`.
    """
    table = values.double() if values.dim() == 2 else values.double().unsqueeze(1)
    counted = torch.ones_like(table) if mask is None else mask.bool().double()
    table = torch.where(counted.bool(), table, 0.0)
    ids = {"batch": torch.zeros_like(group_ids), "group": group_ids}
    mean = torch.zeros_like(table)
    if config.mean_level is not None:
        mean = _mean(table, counted, ids[config.mean_level], config.mean_leave1out)
    centred = (table - mean) * counted
    if config.std_level is not None:
        centred = centred / (_deviation(centred, counted, ids[config.std_level], config.std_unbiased) + config.eps)
    return centred.view_as(values).to(values.dtype)


def _row_sums(table: Tensor, ids: Tensor) -> Tensor:
    return group_sum(table.sum(dim=1), ids)[ids].unsqueeze(1)


def _mean(table: Tensor, counted: Tensor, ids: Tensor, leave_one_out: bool) -> Tensor:
    total, count = _row_sums(table, ids), _row_sums(counted, ids)
    return (total - table) / (count - 1).clamp(min=1) if leave_one_out else total / count.clamp(min=1)


def _deviation(centred: Tensor, counted: Tensor, ids: Tensor, unbiased: bool) -> Tensor:
    square, count = _row_sums(centred.square(), ids), _row_sums(counted, ids)
    degrees = count - 1 if unbiased else count
    std = (square / degrees.clamp(min=1)).sqrt()
    return torch.where(degrees > 0, std, torch.ones_like(std))
