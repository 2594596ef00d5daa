"""Sums and means over the tokens that count; whatever lies outside a mask, NaN included, has no influence."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is non-zero."""
    kept = torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is non-zero; 0 where nothing is."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """`(values - mean) / sqrt(unbiased variance + epsilon)` over the mask, 0 outside; all 0 for a single element."""
    count = mask.bool().sum()
    centred = values - masked_mean(values, mask)
    variance = masked_sum(centred.square(), mask) / (count - 1).clamp(min=1)
    return torch.where(mask.bool(), centred * torch.rsqrt(variance + epsilon), torch.zeros_like(values))


def last_token(mask: Tensor) -> Tensor:
    """Column of the last non-zero entry of each row (B,), 0 for an empty row."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask.bool(), columns, torch.zeros_like(columns)).amax(dim=1)


def at_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """Row scores (B,) placed at the last non-zero column of `mask` (B, R); empty rows stay 0."""
    placed = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    kept = torch.where(mask.bool().any(dim=1), scores, torch.zeros_like(scores))
    return placed.scatter(1, last_token(mask).unsqueeze(1), kept.unsqueeze(1))
