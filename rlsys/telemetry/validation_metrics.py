"""Validation metrics with verl's names and bootstrap: mean@N, best@N, worst@N, maj@N, and the unbiased pass@k."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import comb
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsys.utils.grouping import group_by

Floats = NDArray[np.float64]
NUM_BOOTSTRAP = 1000
CORRECT_AT = 1.0
"""A response whose score is at least this counts as correct."""


def validation_metrics(
    data_sources: Sequence[str], uids: Sequence[Hashable], infos: Mapping[str, Sequence[Any]], *, seed: int = 42
) -> dict[str, float]:
    """`val-core/{data_source}/{acc|reward}/...` and `val-aux/...` over the responses of each prompt.

    Row i has a data source, the id of its prompt (`uids`; verl groups by the prompt's text) and one value in every list
    of `infos` (reward, acc, ..., pred). Non-numeric values are left out. Per prompt with N responses: `mean@N`; for
    N > 1 `std@N`, and for n = 2, 4, ..., N over NUM_BOOTSTRAP draws with replacement `best@n/{mean,std}`,
    `worst@n/{mean,std}` and, where `pred` is given, `maj@n/{mean,std}`; then the mean over prompts. The core variable
    (acc where all responses of a source have one, else reward) also gets `pass@n`, a response being correct when its
    value is at least CORRECT_AT.
    Raises ValueError when the columns differ in length.
    """
    for name, column in {"uids": uids, **infos}.items():
        if len(column) != len(data_sources):
            raise ValueError(f"'{name}' has {len(column)} values for {len(data_sources)} rows")
    accs = infos.get("acc", [None] * len(data_sources))
    ungraded = {source for source, acc in zip(data_sources, accs) if not isinstance(acc, Real | np.bool_)}
    core = {source: "reward" if source in ungraded else "acc" for source in data_sources}
    by_metric: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (source, _), rows in group_by(range(len(uids)), lambda row: (data_sources[row], uids[row])).items():
        for variable, column in infos.items():
            numeric = [i for i in rows if isinstance(column[i], Real | np.bool_)]
            if not numeric:
                continue
            values = np.array([float(column[i]) for i in numeric])
            codes = None
            if "pred" in infos:
                codes = np.unique(np.array([str(infos["pred"][i]) for i in numeric], object), return_inverse=True)[1]
            metrics = _prompt_metrics(values, codes, seed=seed)
            if variable == core[source] and len(values) > 1:  # of a single response it equals the mean
                correct = int((values >= CORRECT_AT).sum())
                metrics |= {f"pass@{k}": pass_at_k(len(values), correct, k) for k in (1, *_subset_sizes(len(values)))}
            for metric, value in metrics.items():
                by_metric[source, variable, metric].append(value)
    return _named(by_metric, core)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, include a correct one (arXiv 2107.03374, eq. 1)."""
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} is not defined for {num_correct} correct of {num_samples} samples")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def _subset_sizes(num: int) -> list[int]:
    """2, 4, 8, ... below `num`, then `num` itself; nothing for a single response."""
    return [*(2**i for i in range(1, (num - 1).bit_length())), num] if num > 1 else []


@lru_cache(maxsize=64)
def _draws(num: int, size: int, seed: int) -> NDArray[np.int64]:
    """Indices (NUM_BOOTSTRAP, size) with replacement; NumPy's legacy generator gives verl's own draws for a seed."""
    return np.random.RandomState(seed).randint(0, num, size=(NUM_BOOTSTRAP, size))


def _prompt_metrics(values: Floats, codes: NDArray[np.int64] | None, *, seed: int) -> dict[str, float]:
    num = len(values)
    metrics = {f"mean@{num}": float(values.mean())}
    if num > 1:
        metrics[f"std@{num}"] = float(values.std())
    for n in _subset_sizes(num):
        draws = _draws(num, n, seed)
        picked = {"best": values[draws].max(1), "worst": values[draws].min(1)}
        if codes is not None:
            picked["maj"] = values[_majority(draws, codes)]
        for name, of_draw in picked.items():
            metrics |= {f"{name}@{n}/mean": float(of_draw.mean()), f"{name}@{n}/std": float(of_draw.std())}
    return metrics


def _majority(draws: NDArray[np.int64], codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The response of each draw with its most frequent prediction; a tie goes to the prediction drawn first.

    `codes` number the predictions of the responses.
    """
    rows = np.arange(len(draws))
    counts = np.zeros((len(draws), codes.max() + 1), dtype=np.int64)
    np.add.at(counts, (rows[:, None], codes[draws]), 1)
    return draws[rows, counts[rows[:, None], codes[draws]].argmax(1)]


def _named(by_metric: Mapping[tuple[str, str, str], list[float]], core: Mapping[str, str]) -> dict[str, float]:
    largest = {key[:2]: _size(key[2]) for key in sorted(by_metric, key=lambda key: _size(key[2]))}  # the last one stays
    named = {}
    for (source, variable, metric), values in by_metric.items():
        headline = variable == core[source] and metric.startswith(("mean", "best", "maj", "pass"))
        section = "val-core" if headline and _size(metric) == largest[source, variable] else "val-aux"
        named[f"{section}/{source}/{variable}/{metric}"] = float(np.mean(values))
    return named


def _size(metric: str) -> int:
    return int(metric.split("@")[1].split("/")[0])
