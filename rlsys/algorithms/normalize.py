"""AReaL's normalisation of rewards and advantages by batch or group."""

import torch
from torch import Tensor

from rlsys.algorithms.groups import group_sum
from rlsys.config.schema.algorithm import NormConfig


@torch.no_grad()
def normalize(values: Tensor, config: NormConfig, *, group_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Values (B,), or (B, R) with a mask, minus a mean and divided by a deviation; 0 outside the mask.

    The deviation is about the mean that was subtracted (about 0 if none was), in float64, plus `eps`; it is 1 for a
    set of one element if `std_unbiased`, and the mean is 0 for one with `mean_leave1out`.
    """
    table = values.double() if values.dim() == 2 else values.double().unsqueeze(1)
    counted = torch.ones_like(table) if mask is None else mask.bool().double()
    table = torch.where(counted.bool(), table, 0.0)
    whole = torch.zeros_like(group_ids)
    mean = torch.zeros_like(table)
    if config.mean_level is not None:
        ids = whole if config.mean_level == "batch" else group_ids
        mean = _mean(table, counted, ids, config.mean_leave1out)
    centred = (table - mean) * counted
    if config.std_level is not None:
        ids = whole if config.std_level == "batch" else group_ids
        centred = centred / (_deviation(centred, counted, ids, config.std_unbiased) + config.eps)
    return centred.view_as(values).to(values.dtype)


def _row_sums(table: Tensor, ids: Tensor) -> Tensor:
    return group_sum(table.sum(dim=1), ids)[ids].unsqueeze(1)


def _mean(table: Tensor, counted: Tensor, ids: Tensor, leave_one_out: bool) -> Tensor:
    total, count = _row_sums(table, ids), _row_sums(counted, ids)
    if leave_one_out:
        others = (total - table) / (count - 1).clamp(min=1)
        return torch.where(count > 1, others, torch.zeros_like(others))
    return total / count.clamp(min=1)


def _deviation(centred: Tensor, counted: Tensor, ids: Tensor, unbiased: bool) -> Tensor:
    square, count = _row_sums(centred.square(), ids), _row_sums(counted, ids)
    degrees = count - 1 if unbiased else count
    std = (square / degrees.clamp(min=1)).sqrt()
    return torch.where(degrees > 0, std, torch.ones_like(std))
