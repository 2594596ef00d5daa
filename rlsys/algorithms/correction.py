"""Correcting for rollouts drawn from another policy than the one trained: weights, rejection, diagnostics.

The rollout engine computes other log-probabilities than the trainer (kernels, precision, staleness). Write
`log rho = old_log_probs - rollout_log_probs` (B, R). Truncated importance sampling (TIS,
fengyao.notion.site/off-policy-rl) multiplies the loss by rho, at most a threshold; masked importance sampling (MIS,
IcePop, arXiv:2510.18855) drops what is outside an interval; rejection removes tokens or rows from the mask.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.algorithms.masked import masked_mean, masked_sum
from rlsys.algorithms.mismatch import SAFETY_BOUND, mismatch_metrics
from rlsys.config.bounds import rejection_bounds, weight_bounds
from rlsys.config.schema.algorithm import RolloutCorrectionConfig


@dataclass(frozen=True)
class Corrected:
    """Weights (B, R) or None, the mask that remains (B, R), and metrics under `rollout_corr/`."""

    weights: Tensor | None
    response_mask: Tensor
    metrics: dict[str, float]


@torch.no_grad()
def rollout_correction(
    *, old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> Corrected:
    """Importance weights and the mask after rejection, for a whole batch (B, R).

    Weights are 0 outside the mask; rejection does not change them, as in verl.
    """
    log_ratio = torch.where(response_mask.bool(), old_log_probs - rollout_log_probs, 0.0)
    metrics = mismatch_metrics(old_log_probs, rollout_log_probs, response_mask)
    weights = None
    if config.rollout_is is not None:
        weights, is_metrics = importance_weights(log_ratio, response_mask, config)
        metrics |= is_metrics
    kept, rs_metrics = rejection_mask(log_ratio, response_mask, config)
    metrics |= rs_metrics
    return Corrected(weights, kept, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def importance_weights(
    log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, float]]:
    """Weights rho (B, R) per token, or their product per row at each of its tokens, truncated or masked.

    With `rollout_is_batch_normalize` their mean, over tokens or over rows, is made 1.
    """
    low, high = weight_bounds(config)
    by_row = config.rollout_is == "sequence"
    exponent = masked_sum(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio) if by_row else log_ratio
    raw = torch.where(mask.bool(), exponent.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp(), 0.0)
    inside = raw <= high if low is None else (raw >= low) & (raw <= high)
    weights = raw.clamp(max=high) if low is None else torch.where(inside, raw, 0.0)
    exponents = exponent[mask.bool().any(dim=1), 0] if by_row else exponent[mask.bool()]
    metrics = _weight_metrics(weights, raw, exponents, mask, low, high)
    if low is not None:
        metrics["rollout_is_oob_ratio"] = masked_mean((~inside).double(), mask).item()
    if config.rollout_is_batch_normalize:
        rows = mask.bool().any(dim=1)
        mean = masked_mean(masked_mean(weights, mask, dim=1), rows) if by_row else masked_mean(weights, mask)
        factor = mean.item() if mean.item() > 1e-8 else 1.0
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def _weight_metrics(
    weights: Tensor, raw: Tensor, exponents: Tensor, mask: Tensor, low: float | None, high: float
) -> dict[str, float]:
    low = 1 / high if low is None else low
    valid = mask.bool()
    if not valid.any():
        return {}
    mean = masked_mean(weights, mask)
    square = masked_mean(weights.square(), mask)
    rows = masked_mean(weights, mask, dim=1)[valid.any(dim=1)]
    raw_rows = masked_mean(raw, mask, dim=1)[valid.any(dim=1)]
    applied = weights[valid]
    values = {
        "rollout_is_mean": mean,
        "rollout_is_max": applied.max(),
        "rollout_is_min": applied.min(),
        "rollout_is_std": (square - mean.square()).clamp(min=0).sqrt(),
        "rollout_is_eff_sample_size": mean.square() / square.clamp(min=1e-30),
        "rollout_is_ratio_fraction_high": (exponents > math.log(high)).double().mean(),
        "rollout_is_ratio_fraction_low": (exponents < (math.log(low) if low else -math.inf)).double().mean(),
        **_spread("rollout_is_seq", rows),
        "rollout_is_seq_max_deviation": (rows - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_rows > high).double().mean(),
        "rollout_is_seq_fraction_low": (raw_rows < low).double().mean(),
    }
    return {name: value.item() for name, value in values.items()}


def _spread(name: str, rows: Tensor) -> dict[str, Tensor]:
    std = rows.std() if len(rows) > 1 else torch.zeros(())
    return {f"{name}_mean": rows.mean(), f"{name}_std": std, f"{name}_max": rows.max(), f"{name}_min": rows.min()}


def rejection_mask(log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> tuple[Tensor, dict[str, float]]:
    """The mask (B, R) without the tokens or rows whose divergence is out of bounds; a token must pass every mode.

    Statistics are of `-log rho` (k1), `(log rho)^2 / 2` (k2) and `rho - log rho - 1` (k3), per token or as the sum,
    mean or maximum of a row. `token_m2` bounds the mean of `(log rho)^2` over the kept tokens of the batch by removing
    those with the largest (the second moment of M2PO, arXiv:2510.01161). A token with rho below the veto threshold
    removes its row.
    """
    safe = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    valid = mask.bool()
    kept = torch.ones_like(valid)
    metrics: dict[str, float] = {}
    rejections = rejection_bounds(config)
    for mode, low, high in rejections:
        statistic = _statistic(mode, safe, valid)
        high = _cut_for_mean(statistic[valid], high) if mode == "token_m2" else high
        inside = statistic <= high if low is None else (statistic >= low) & (statistic <= high)
        kept = kept & inside
        metrics |= _rejection_metrics(mode, statistic, inside, valid, low, high)
    if config.rollout_token_veto_threshold is not None:
        vetoed = ((log_ratio < math.log(config.rollout_token_veto_threshold)) & valid).any(dim=1, keepdim=True)
        kept = kept & ~vetoed
        metrics["rollout_is_veto_fraction"] = vetoed.double().mean().item()
    if rejections:
        metrics["rollout_rs_masked_fraction"] = masked_mean((~kept).double(), valid).item()
        metrics["rollout_rs_seq_masked_fraction"] = (~kept & valid).any(dim=1).double().mean().item()
    return torch.where(kept, mask, torch.zeros_like(mask)), metrics


def _statistic(mode: str, log_ratio: Tensor, valid: Tensor) -> Tensor:
    level, _, estimator = mode.rpartition("_")
    per_token = {
        "k1": lambda: -log_ratio,
        "k2": lambda: 0.5 * log_ratio.square(),
        "k3": lambda: log_ratio.exp() - 1 - log_ratio,
        "m2": log_ratio.square,
    }[estimator]()
    if level == "token":
        return per_token
    by_row = {
        "seq_sum": lambda: masked_sum(per_token, valid, dim=1),
        "seq_mean": lambda: masked_mean(per_token, valid, dim=1),
        "seq_max": lambda: torch.where(valid, per_token, torch.zeros_like(per_token)).amax(dim=1),
    }[level]()
    return by_row.unsqueeze(1).expand_as(log_ratio)


def _cut_for_mean(values: Tensor, limit: float) -> float:
    """The largest of the values such that the mean of all up to it is at most `limit`; 0 if there is none."""
    values = values.double().sort().values
    within = int((values.cumsum(0) / torch.arange(1, len(values) + 1, device=values.device) <= limit).sum())
    return values[within - 1].item() if within else 0.0


def _rejection_metrics(
    mode: str, statistic: Tensor, inside: Tensor, valid: Tensor, low: float | None, high: float
) -> dict[str, float]:
    if not valid.any():
        return {}
    rows, tokens, floor = valid.any(dim=1), statistic[valid], 0.0 if low is None else low
    by_row = not mode.startswith("token")
    per_row = statistic[rows, 0] if by_row else masked_mean(statistic, valid, dim=1)[rows]
    units = per_row if by_row else tokens
    values = {
        "mean": tokens.mean(),
        "std": tokens.clamp(floor, high).std(correction=0),
        "max": units.max(),
        "min": units.min(),
        "fraction_high": (units > high).double().mean(),
        "fraction_low": (units < floor).double().mean(),
        "masked_fraction": (~inside[valid]).double().mean(),
        **_spread("seq", per_row),
        "seq_max_deviation": per_row.abs().max(),
        "seq_fraction_high": (per_row > high).double().mean(),
        "seq_masked_fraction": (~inside & valid).any(dim=1)[rows].double().mean(),
    }
    if low is not None:
        values["seq_fraction_low"] = (per_row < low).double().mean()
    return {f"rollout_rs_{mode}_{name}": value.item() for name, value in values.items()}
