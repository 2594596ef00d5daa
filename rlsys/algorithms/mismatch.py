"""Diagnostics of the difference between the rollout engine's log-probabilities and the trainer's."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.masked import masked_max, masked_mean, masked_sum

SAFETY_BOUND = 20.0
Values = dict[str, Tensor]
"""Metrics on the device, for which the host need not wait."""


@torch.no_grad()
def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Values:
    """KL(rollout || trainer), perplexities and chi-squared divergences over a batch (B, R), on its device.

    Rows without a counting token are left out. Names are verl's, without the prefix `rollout_corr/`.
    """
    valid = response_mask.bool()
    rows = valid.any(dim=1)
    ours, theirs = log_probs.double(), rollout_log_probs.double()
    log_ratio = ours - theirs
    mean_ours, mean_theirs = masked_mean(ours, valid, dim=1), masked_mean(theirs, valid, dim=1)
    difference = mean_theirs - mean_ours
    safe = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    row_sum = masked_sum(log_ratio, valid, dim=1).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return {
        "training_ppl": masked_mean((-mean_ours).exp(), rows),
        "training_log_ppl": -masked_mean(mean_ours, rows),
        "kl": masked_mean(-log_ratio, valid),
        "k3_kl": masked_mean(safe.exp() - safe - 1, valid),
        "rollout_ppl": masked_mean((-mean_theirs).exp(), rows),
        "rollout_log_ppl": -masked_mean(mean_theirs, rows),
        "log_ppl_diff": masked_mean(difference, rows),
        "log_ppl_abs_diff": masked_mean(difference.abs(), rows),
        "log_ppl_diff_max": masked_max(difference, rows),
        "log_ppl_diff_min": -masked_max(-difference, rows),
        "ppl_ratio": masked_mean(difference.exp(), rows),
        "chi2_token": masked_mean((2 * safe).exp(), valid) - 1,
        "chi2_seq": masked_mean((2 * row_sum).exp(), rows) - 1,
    }


@torch.no_grad()
def probs_diff_metrics(*, old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Difference of the sampled tokens' probabilities, trainer against rollout (arXiv:2506.13585).

    training/rollout_probs_diff_{valid,max,mean,std} and training/rollout_actor_probs_pearson_corr; NaN and valid = 0
    where no token counts.
    """
    valid = response_mask.bool()
    ours, theirs = old_log_probs[valid].double().exp(), rollout_log_probs[valid].double().exp()
    difference = (ours - theirs).abs()
    single = 0.0 if len(ours) else math.nan
    correlation = torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item() if len(ours) > 1 else math.nan
    return {
        "training/rollout_probs_diff_valid": float(len(ours) > 0),
        "training/rollout_probs_diff_max": difference.max().item() if len(ours) else math.nan,
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std().item() if len(ours) > 1 else single,
        "training/rollout_actor_probs_pearson_corr": correlation,
    }


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
