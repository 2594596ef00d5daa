"""Differences between trainer and rollout engine in the log-probabilities of the same tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.mismatch import SAFETY_BOUND


@dataclass(frozen=True)
class Parity:
    """Differences over `num_tokens` tokens; the largest is at (`row`, `column`), between `trainer` and `engine`."""

    num_tokens: int
    mean_abs: float
    max_abs: float
    k3: float
    row: int
    column: int
    trainer: float
    engine: float


@torch.no_grad()
def compare_log_probs(trainer: Tensor, engine: Tensor, mask: Tensor) -> Parity:
    """Compare log-probabilities (B, R) where `mask` is set; ValueError where nothing is.

    `k3` estimates KL(rollout || trainer) in nats a token (Schulman, joschu.net/blog/kl-approx.html). A value that is
    not finite makes the differences infinite.
    """
    valid = mask.bool()
    if not valid.any():
        raise ValueError("the mask is empty: no log-probabilities to compare")
    ours, theirs = trainer.double(), engine.double()
    log_ratio = (ours - theirs).nan_to_num(math.inf, math.inf, -math.inf)
    away = torch.where(valid, log_ratio.abs(), -1.0)
    row, column = divmod(int(away.argmax()), away.shape[1])
    safe = log_ratio[valid].clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return Parity(
        num_tokens=int(valid.sum()),
        mean_abs=away[valid].mean().item(),
        max_abs=away[row, column].item(),
        k3=(safe.exp() - safe - 1).mean().item(),
        row=row,
        column=column,
        trainer=ours[row, column].item(),
        engine=theirs[row, column].item(),
    )
