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

from rlsys.algorithms.masked import masked_max, masked_mean, masked_std, masked_sum
from rlsys.algorithms.mismatch import SAFETY_BOUND, Values, mismatch_metrics
from rlsys.config.bounds import rejection_bounds, weight_bounds
from rlsys.config.schema.algorithm import RolloutCorrectionConfig


@dataclass(frozen=True)
class Corrected:
    """Weights (B, R) or None, the mask that remains (B, R), and values under `rollout_corr/`, if any token `counts`."""

    weights: Tensor | None
    response_mask: Tensor
    values: Values
    counts: Tensor

    @property
    def metrics(self) -> dict[str, float]:
        """The values as numbers, for which the host waits for the device; none where no token counts."""
        return {name: value.item() for name, value in self.values.items()} if self.counts else {}


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
    values = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    return Corrected(weights, kept, values, response_mask.any())


def importance_weights(log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> tuple[Tensor, Values]:
    """Weights rho (B, R) per token, or their product per row at each of its tokens, truncated or masked.

    With `rollout_is_batch_normalize` their mean, over tokens or over rows, is made 1.
    """
    low, high = weight_bounds(config)
    by_row = config.rollout_is == "sequence"
    exponent = masked_sum(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio) if by_row else log_ratio
    raw = torch.where(mask.bool(), exponent.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp(), 0.0)
    inside = raw <= high if low is None else (raw >= low) & (raw <= high)
    weights = raw.clamp(max=high) if low is None else torch.where(inside, raw, 0.0)
    rows = mask.bool().any(dim=1)
    metrics = _weight_metrics(weights, raw, (exponent[:, 0], rows) if by_row else (exponent, mask), mask, low, high)
    if low is not None:
        metrics["rollout_is_oob_ratio"] = _share(~inside, mask)
    if config.rollout_is_batch_normalize:
        mean = masked_mean(masked_mean(weights, mask, dim=1), rows) if by_row else masked_mean(weights, mask)
        factor = torch.where(mean > 1e-8, mean, 1.0)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def _weight_metrics(
    weights: Tensor, raw: Tensor, exponents: tuple[Tensor, Tensor], mask: Tensor, low: float | None, high: float
) -> Values:
    low = 1 / high if low is None else low
    mean, square = masked_mean(weights, mask), masked_mean(weights.square(), mask)
    rows, raw_rows = (masked_mean(x, mask, dim=1) for x in (weights, raw))
    (values, counted), has_tokens = exponents, mask.bool().any(dim=1)
    return {
        "rollout_is_mean": mean,
        "rollout_is_max": masked_max(weights, mask),
        "rollout_is_min": -masked_max(-weights, mask),
        "rollout_is_std": masked_std(weights, mask, correction=0),
        "rollout_is_eff_sample_size": mean.square() / square.clamp(min=1e-30),
        "rollout_is_ratio_fraction_high": _share(values > math.log(high), counted),
        "rollout_is_ratio_fraction_low": _share(values < (math.log(low) if low else -math.inf), counted),
        **_spread("rollout_is_seq", rows, has_tokens),
        "rollout_is_seq_max_deviation": masked_max((rows - 1).abs(), has_tokens),
        "rollout_is_seq_fraction_high": _share(raw_rows > high, has_tokens),
        "rollout_is_seq_fraction_low": _share(raw_rows < low, has_tokens),
    }


def _share(holds: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(holds.double(), mask)


def _spread(name: str, rows: Tensor, mask: Tensor) -> Values:
    values = {"mean": masked_mean(rows, mask), "std": masked_std(rows, mask), "max": masked_max(rows, mask)}
    return {f"{name}_{kind}": value for kind, value in (values | {"min": -masked_max(-rows, mask)}).items()}


def rejection_mask(log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> tuple[Tensor, Values]:
    """The mask (B, R) without the tokens or rows whose divergence is out of bounds; a token must pass every mode.

    Statistics are of `-log rho` (k1), `(log rho)^2 / 2` (k2) and `rho - log rho - 1` (k3), per token or as the sum,
    mean or maximum of a row. `token_m2` bounds the mean of `(log rho)^2` over the kept tokens of the batch by removing
    those with the largest (the second moment of M2PO, arXiv:2510.01161). A token with rho below the veto threshold
    removes its row.
    """
    safe = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    valid = mask.bool()
    kept = torch.ones_like(valid)
    metrics: Values = {}
    rejections = rejection_bounds(config)
    for mode, low, limit in rejections:
        statistic = _statistic(mode, safe, valid)
        high: float | Tensor = _cut_for_mean(statistic, valid, limit) if mode == "token_m2" else limit
        inside = statistic <= high if low is None else (statistic >= low) & (statistic <= high)
        kept = kept & inside
        metrics |= _rejection_metrics(mode, statistic, inside, valid, low, high)
    if config.rollout_token_veto_threshold is not None:
        vetoed = ((log_ratio < math.log(config.rollout_token_veto_threshold)) & valid).any(dim=1, keepdim=True)
        kept = kept & ~vetoed
        metrics["rollout_is_veto_fraction"] = _share(vetoed.squeeze(1), valid.any(dim=1))
    if rejections:
        metrics["rollout_rs_masked_fraction"] = _share(~kept, valid)
        metrics["rollout_rs_seq_masked_fraction"] = _share((~kept & valid).any(dim=1), valid.any(dim=1))
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


def _cut_for_mean(values: Tensor, mask: Tensor, limit: float) -> Tensor:
    """The largest of the values, none negative, such that the mean of all up to it is at most `limit`; or 0."""
    ordered = torch.where(mask, values.double(), torch.inf).flatten().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=values.device)
    return torch.where(means <= limit, ordered, 0.0).amax()


def _rejection_metrics(
    mode: str, statistic: Tensor, inside: Tensor, valid: Tensor, low: float | None, high: float | Tensor
) -> Values:
    rows, floor, by_row = valid.any(dim=1), 0.0 if low is None else low, not mode.startswith("token")
    per_row = statistic[:, 0] if by_row else masked_mean(statistic, valid, dim=1)
    units, counted = (per_row, rows) if by_row else (statistic, valid)
    values = {
        "mean": masked_mean(statistic, valid),
        "std": masked_std(statistic.clamp(min=floor).clamp(max=high), valid, correction=0),
        "max": masked_max(units, counted),
        "min": -masked_max(-units, counted),
        "fraction_high": _share(units > high, counted),
        "fraction_low": _share(units < floor, counted),
        "masked_fraction": _share(~inside, valid),
        **_spread("seq", per_row, rows),
        "seq_max_deviation": masked_max(per_row.abs(), rows),
        "seq_fraction_high": _share(per_row > high, rows),
        "seq_masked_fraction": _share((~inside & valid).any(dim=1), rows),
    }
    if low is not None:
        values["seq_fraction_low"] = _share(per_row < low, rows)
    return {f"rollout_rs_{mode}_{name}": value for name, value in values.items()}
