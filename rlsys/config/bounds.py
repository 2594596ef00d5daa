"""The bounds of algorithm.rollout_correction: a number, or "low_high"."""

import math

from rlsys.config.schema.algorithm import RolloutCorrectionConfig
from rlsys.config.vocabulary import REJECTION_ALIASES, REJECTION_MODES

KEY = "algorithm.rollout_correction"


def weight_bounds(config: RolloutCorrectionConfig) -> tuple[float | None, float]:
    """(low, high) of importance weights; low is None if they are truncated; ValueError for a wrong threshold."""
    return _bounds("rollout_is_threshold", config.rollout_is_threshold)


def rejection_bounds(config: RolloutCorrectionConfig) -> tuple[tuple[str, float | None, float], ...]:
    """(mode, low, high) of every mode in `rollout_rs`, as bounds of its statistic.

    The k1 modes bound the ratio rollout / trainer by (1 / x, x) or "low_high", the others the estimate from above.
    ValueError for an unknown mode or a threshold that does not fit.
    """
    modes = [REJECTION_ALIASES.get(mode, mode) for mode in _parts(config.rollout_rs)]
    limits, lowest = _parts(config.rollout_rs_threshold), config.rollout_rs_threshold_lower
    if unknown := [mode for mode in modes if mode not in REJECTION_MODES]:
        known = ", ".join((*REJECTION_ALIASES, *REJECTION_MODES))
        raise ValueError(f"{KEY}.rollout_rs = {config.rollout_rs}: '{unknown[0]}' is not one of {known}")
    if modes and len(limits) not in (1, len(modes)):
        why = f"set one bound, or one for each of the {len(modes)} measures of rollout_rs"
        raise ValueError(f"{KEY}.rollout_rs_threshold = {config.rollout_rs_threshold}: {why}")
    pairs = zip(modes, limits * len(modes) if len(limits) == 1 else limits, strict=False)
    return tuple(_rejection(mode, limit, lowest) for mode, limit in dict(pairs).items())


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _rejection(mode: str, limit: str, lowest: float | None) -> tuple[str, float | None, float]:
    key = "rollout_rs_threshold"
    low, high = _bounds(key, limit)
    if not mode.endswith("k1"):
        if low is not None:
            raise ValueError(f"{KEY}.{key}: {mode} takes one upper bound, not {limit}")
        return mode, None, high
    if lowest is not None:  # both bound the inverse ratio
        low, high = 1 / high, 1 / lowest
    low = 1 / high if low is None else low
    if not 0 < low <= high:
        raise ValueError(f"{KEY}.{key} = {limit}: {mode} takes a ratio of at least 1, or low_high, e.g. 0.5_2.0")
    return mode, math.log(low), math.log(high)


def _bounds(key: str, text: str) -> tuple[float | None, float]:
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    is_rising = numbers == sorted(numbers) and min(numbers, default=0) >= 0 and 0 < max(numbers, default=0) < 1e9
    if len(numbers) not in (1, 2) or not is_rising:
        raise ValueError(f"{KEY}.{key} = {text}: must be a number above 0, or low_high, e.g. 0.5_2.0")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
