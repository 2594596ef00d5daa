"""AReaL's reward and advantage knobs: bias, scale, clip and normalisation by batch or group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.groups import group_sum

LEVELS = (None, "batch", "group")


@dataclass(frozen=True)
class NormSettings:
    """What to subtract and to divide by: the statistics of the whole batch, of the row's group, or nothing (None).

    `mean_leave1out` leaves the element itself out of the mean that it is compared with.
    """

    mean_level: str | None = "batch"
    std_level: str | None = "batch"
    mean_leave1out: bool = False
    std_unbiased: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("mean_level", "std_level"):
            if getattr(self, name) not in LEVELS:
                raise ValueError(f"{name} must be batch, group or null, got '{getattr(self, name)}'")


@dataclass(frozen=True)
class RewardSettings:
    """AReaL's reward stage: `clip((r + bias) * scaling, +-clip)`, then `norm`."""

    reward_bias: float = 0.0
    reward_scaling: float = 1.0
    reward_clip: float = 20.0
    reward_norm: NormSettings | None = None
    mask_no_eos_with_zero: bool = False


@torch.no_grad()
def normalize(values: Tensor, settings: NormSettings, *, group_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Values (B,), or (B, R) with a mask, less a mean and over a deviation; 0 outside the mask.

    The deviation is about the very mean that was subtracted (about 0 if none was), in float64, plus `eps`; it is 1 for
    a set of one element if `std_unbiased`, and the mean is 0 for one with `mean_leave1out`.
    """
    table = values.double() if values.dim() == 2 else values.double().unsqueeze(1)
    counted = torch.ones_like(table) if mask is None else mask.bool().double()
    table = torch.where(counted.bool(), table, 0.0)
    whole = torch.zeros_like(group_ids)
    mean = torch.zeros_like(table)
    if settings.mean_level is not None:
        ids = whole if settings.mean_level == "batch" else group_ids
        mean = _mean(table, counted, ids, settings.mean_leave1out)
    centred = (table - mean) * counted
    if settings.std_level is not None:
        ids = whole if settings.std_level == "batch" else group_ids
        centred = centred / (_deviation(centred, counted, ids, settings.std_unbiased) + settings.eps)
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


@torch.no_grad()
def shape_rewards(scores: Tensor, settings: RewardSettings, *, group_ids: Tensor, truncated: Tensor) -> Tensor:
    """Outcomes (B,) after AReaL's reward stage, in its order: bias and scaling, clip, norm, truncation.

    `truncated` (B,) bool marks responses without an end; with `mask_no_eos_with_zero` those get 0, after the others
    have been normalised together with them.
    """
    shaped = (scores.double() + settings.reward_bias) * settings.reward_scaling
    shaped = shaped.clamp(min=-settings.reward_clip, max=settings.reward_clip)
    if settings.reward_norm is not None:
        shaped = normalize(shaped, settings.reward_norm, group_ids=group_ids)
    if settings.mask_no_eos_with_zero:
        shaped = torch.where(truncated, torch.zeros_like(shaped), shaped)
    return shaped.to(scores.dtype)
