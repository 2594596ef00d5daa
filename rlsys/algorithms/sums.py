"""Sums and counts on the device, made into plain numbers with one transfer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlsys.interfaces import LossSum

Sums = Mapping[str, tuple[Tensor, Tensor]]


def to_loss_sum(total: Tensor, count: Tensor, metrics: Sums) -> LossSum:
    """A LossSum; all counts and metrics leave the device together."""
    flat = [count, *(part for pair in metrics.values() for part in pair)]
    numbers = torch.stack([part.detach().double() for part in flat]).tolist()
    pairs = zip(numbers[1::2], numbers[2::2], strict=True)
    return LossSum(total=total, count=numbers[0], metrics=dict(zip(metrics, pairs, strict=True)))
