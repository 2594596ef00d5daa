"""Which rank computes which rows: balance over ranks, micro-batches under a token budget.

Everything here is deterministic arithmetic on lengths: ranks with the same lengths get the same result.
Lengths are in tokens.
"""

import bisect
from collections.abc import Callable, Sequence

import numpy as np

from rlsys.batching.partition import balanced_partitions

Lengths = Sequence[int] | np.ndarray

TOO_LONG = 1 << 30


def balance_rows(lengths: Lengths, num_ranks: int, mini_batch_rows: int | None = None) -> np.ndarray:
    """The row order that gives every rank the same number of rows and about as many tokens in every mini-batch.

    Mini-batch j is rows j * mini_batch_rows and following of the given order whatever `num_ranks` is; the last may be
    shorter. Dispatch the reordered rows in `num_ranks` contiguous chunks and split each chunk by
    mini_batch_rows / num_ranks rows: the j-th splits of all ranks are mini-batch j. ValueError unless every mini-batch
    divides by `num_ranks`.
    """
    work = _array(lengths)
    step = max(len(work), 1) if mini_batch_rows is None else mini_batch_rows
    if num_ranks < 1 or step < 1 or any(rows % num_ranks for rows in (min(step, len(work)), len(work) % step)):
        raise ValueError(f"mini-batches of {step} out of {len(work)} rows do not divide over {num_ranks} ranks")
    shares: list[list[np.ndarray]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(work), step):
        parts = balanced_partitions(work[start : start + step], num_ranks, equal_size=True)
        for share, part in zip(shares, parts, strict=True):
            share.append(part + start)
    return np.concatenate([part for share in shares for part in share]) if len(work) else np.empty(0, np.int64)


def micro_batches(lengths: Lengths, max_tokens: int, *, agree: Callable[[int], int] | None = None) -> list[np.ndarray]:
    """Rows (ascending) of each micro-batch, none over `max_tokens`, the one with the most tokens first.

    About as few as the budget allows (a packing heuristic), balanced. `agree` maps this rank's number to the maximum
    over ranks (an all-reduce), which all ranks then use; micro-batches are empty only if that exceeds the number of
    rows.
    ValueError naming the row if a single one is over the budget, on all ranks if `agree` is given.
    """
    sizes = _array(lengths)
    over = np.flatnonzero(sizes > max_tokens)
    packed = [] if len(over) else _pack_under(sizes, max_tokens)
    count = max(len(packed), 1)
    agreed = count if agree is None else agree(TOO_LONG if len(over) else count)
    if len(over):
        row = int(over[0])
        raise ValueError(f"row {row} of {int(sizes[row])} tokens exceed the budget of {max_tokens} per micro-batch")
    if agreed >= TOO_LONG:
        raise ValueError(f"a row on another rank exceeds the budget of {max_tokens} tokens per micro-batch")
    parts = packed if agreed == len(packed) else _spread(packed, sizes, max_tokens, agreed)
    return sorted(parts, key=lambda part: (-sizes[part].sum(), part[0] if len(part) else len(sizes)))


def _pack_under(sizes: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """As few parts as a balanced partition or best-fit-decreasing reaches."""
    if not len(sizes):
        return []
    least = max(-(-int(sizes.sum()) // max_tokens), int((2 * sizes > max_tokens).sum()), 1)
    if (parts := _balanced_under(sizes, max_tokens, least)) is not None:
        return parts
    fitted = _best_fit(sizes, max_tokens)
    return _balanced_under(sizes, max_tokens, len(fitted)) or fitted


def _balanced_under(sizes: np.ndarray, max_tokens: int, count: int) -> list[np.ndarray] | None:
    parts = balanced_partitions(sizes, count)
    return parts if all(sizes[part].sum() <= max_tokens for part in parts) else None


def _spread(packed: list[np.ndarray], sizes: np.ndarray, max_tokens: int, count: int) -> list[np.ndarray]:
    """`count` parts under the budget, more than the `packed` ones."""
    if count <= len(sizes) and (parts := _balanced_under(sizes, max_tokens, count)):
        return parts
    parts = list(packed)
    while len(parts) < min(count, len(sizes)):
        whole = parts.pop(max(range(len(parts)), key=lambda i: (len(parts[i]) > 1, sizes[parts[i]].sum())))
        parts += [whole[half] for half in balanced_partitions(sizes[whole], 2)]
    return parts + [np.empty(0, np.int64)] * (count - len(parts))


def _best_fit(sizes: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Best-fit-decreasing: every row into the fullest part that still takes it."""
    free: list[tuple[int, int]] = []
    parts: list[list[int]] = []
    for row in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[row])
        at = bisect.bisect_left(free, (size, -1))
        room, part = free.pop(at) if at < len(free) else (max_tokens, len(parts))
        if part == len(parts):
            parts.append([])
        parts[part].append(row)
        bisect.insort(free, (room - size, part))
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts]


def seqlen_metrics(lengths: Lengths, parts: Sequence[np.ndarray]) -> dict[str, float]:
    """Tokens per rank before (contiguous chunks) and after balancing into `parts`, under verl's names."""
    sizes = _array(lengths)
    before = np.add.reduceat(sizes, np.arange(0, len(sizes), max(len(sizes) // len(parts), 1)))
    after = [int(sizes[part].sum()) for part in parts]
    values = {"min": before.min(), "max": before.max(), "minmax_diff": before.max() - before.min()}
    values |= {"balanced_min": min(after), "balanced_max": max(after), "mean": sizes.sum() / len(parts)}
    return {f"global_seqlen/{name}": float(value) for name, value in values.items()}


def _array(lengths: Lengths) -> np.ndarray:
    values = np.asarray(lengths)
    if values.ndim != 1 or (len(values) and values.min() < 0):
        raise ValueError(f"lengths must be 1-D and non-negative, got shape {values.shape}")
    return values if values.dtype.kind == "f" else values.astype(np.int64)
