"""Sums and means over the tokens of a mask; values outside it, NaN included, have no influence."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsys.interfaces import LossSum

TensorSums = Mapping[str, tuple[Tensor, Tensor]]
"""Metrics as (sum, count), still on the device."""


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is non-zero."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device)).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is non-zero; 0 where nothing is."""
    return masked_sum(values, mask, dim) / mask.bool().sum(dim=dim).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor, *, correction: int = 1) -> Tensor:
    """Standard deviation of `values` where `mask` is non-zero; 0 for a single one."""
    squares = masked_sum((values - masked_mean(values, mask)).square(), mask)
    return (squares / (mask.bool().sum() - correction).clamp(min=1)).sqrt()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest of `values` where `mask` is non-zero, which it must be somewhere."""
    return torch.where(mask.bool(), values, -torch.inf).amax()


def masked_whiten(values: Tensor, mask: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """`(values - mean) / sqrt(unbiased variance + 1e-8)` over the mask, 0 outside; all 0 for a single element.

    The statistics are in float64; the result is in `dtype`, by default that of the values.
    """
    counted = mask.bool()
    count = counted.sum()
    mean = torch.where(counted, values, 0.0).double().sum() / count.clamp(min=1)
    centred = torch.where(counted, values - mean, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + 1e-8)).to(dtype or values.dtype)


def at_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """Row scores (B,) placed at the last non-zero column of `mask` (B, R); empty rows stay 0."""
    at_end = torch.nn.functional.pad(scores.unsqueeze(1), (mask.shape[1] - 1, 0))
    return torch.where(mask.bool(), carried_back(at_end, mask), 0)


def carried_back(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards (B, R), those where `mask` is 0 added to the last non-zero column before, or without one to the first."""
    last = torch.where(mask.bool(), torch.arange(mask.shape[1], device=mask.device), 0).cummax(dim=1).values
    return torch.zeros_like(rewards).scatter_add(1, last, rewards)


def to_loss_sum(total: Tensor, count: Tensor, metrics: TensorSums) -> LossSum:
    """A LossSum whose count and metrics stay on the device, without gradient."""
    return LossSum(total, count, {name: (value.detach(), over.detach()) for name, (value, over) in metrics.items()})
