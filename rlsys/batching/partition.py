"""Partition weights into parts of nearly equal sums: largest differencing in rounds, then exchanges.

Karmarkar and Karp (1982), multi-way: a state is a tuple of k partial sums; combining two states adds the largest sums
of one to the smallest of the other. Here each round combines all states at once, those of the largest spread with each
other, which takes a few array operations. The remaining difference is reduced by exchanging single weights between
the largest and the other parts.
"""

import heapq
from collections.abc import Iterator

import numpy as np

CLOSE = 1e-4
EXCHANGES = 4


def balanced_partitions(weights: np.ndarray, num_parts: int, *, equal_size: bool = False) -> list[np.ndarray]:
    """Indices (ascending) of each part; ValueError if there are fewer weights than parts or they do not divide.

    `equal_size` gives all parts the same number. Deterministic: equal weights keep their order.
    """
    num = len(weights)
    if num_parts < 1 or (equal_size and num % num_parts) or (not equal_size and num < num_parts):
        raise ValueError(f"cannot split {num} weights into {num_parts} parts{' of equal size' if equal_size else ''}")
    if num_parts == 1 or num == 0:
        return [np.arange(num) if part == 0 else np.empty(0, np.int64) for part in range(num_parts)]
    weights = np.asarray(weights)
    weights = weights if weights.dtype.kind == "f" else weights.astype(np.int64)
    descending = _descending_order(weights)
    assign = _difference if equal_size else _longest_first
    ascending_parts = [descending[np.sort(part)[::-1]] for part in assign(weights[descending], num_parts)]
    return [np.sort(part) for part in _exchange(weights, ascending_parts, equal_size)]


def _descending_order(weights: np.ndarray) -> np.ndarray:
    rising = weights.max() - weights
    small = weights.dtype.kind == "i" and rising.max() < 1 << 16
    return np.argsort(rising.astype(np.uint16) if small else rising, kind="stable")


def _difference(descending: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Parts of equal size out of descending weights by largest differencing in rounds."""
    sums, items = descending.reshape(-1, num_parts), np.arange(len(descending)).reshape(-1, num_parts, 1)
    while len(sums) > 1:
        if len(sums) % 2:
            sums = np.concatenate((sums, np.zeros_like(sums[:1])))
            items = np.concatenate((items, np.full_like(items[:1], -1)))
        ranked = np.argsort(sums[:, -1] - sums[:, 0], kind="stable")
        wide, narrow = ranked[0::2], ranked[1::2]
        combined = sums[wide] + sums[narrow, ::-1]
        order = np.argsort(-combined, axis=1, kind="stable")
        state = np.arange(len(wide))[:, None]
        sums = combined[state, order]
        items = np.concatenate((items[wide], items[narrow, ::-1]), axis=2)[state, order]
    return [part[part >= 0] for part in items[0]]


def _longest_first(descending: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Parts out of descending weights, each weight to the smallest part so far."""
    heap = [(0, 0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, weight in enumerate(descending.tolist()):
        total, count, part = heap[0]
        heapq.heapreplace(heap, (total + weight, count + 1, part))
        parts[part].append(index)
    return [np.array(part) for part in parts]


class _SortedPart:
    """Weights in ascending order and the indices they come from."""

    def __init__(self, weights: np.ndarray, indices: np.ndarray) -> None:
        self.indices, self.values = indices, weights[indices]

    def take(self, at: int) -> tuple[int, float]:
        taken = self.indices[at], self.values[at]
        self.indices = np.concatenate((self.indices[:at], self.indices[at + 1 :]))
        self.values = np.concatenate((self.values[:at], self.values[at + 1 :]))
        return taken

    def put(self, index: int, value: float) -> None:
        at = self.values.searchsorted(value)
        self.indices = np.concatenate((self.indices[:at], [index], self.indices[at:]))
        self.values = np.concatenate((self.values[:at], [value], self.values[at:]))


def _exchange(weights: np.ndarray, indices: list[np.ndarray], equal_size: bool) -> list[np.ndarray]:
    """Reduce the largest part by exchanges with the smallest one that has a fitting partner, while that helps."""
    parts = [_SortedPart(weights, part) for part in indices]
    sums = np.array([part.values.sum() for part in parts])
    close = max(sums.mean() * CLOSE, 1 if weights.dtype.kind == "i" else 0)
    if sums.max() - sums.min() <= close:
        return indices
    tries = EXCHANGES * len(parts)
    while tries > 0:
        high = int(sums.argmax())
        for low in _smallest_first(sums):
            gap, tries = sums[high] - sums[low], tries - 1
            if gap <= close:
                return [part.indices for part in parts]
            if moved := _exchange_best(parts[high], parts[low], gap, moves=not equal_size):
                sums[high] -= moved
                sums[low] += moved
                break
        else:
            break
    return [part.indices for part in parts]


def _smallest_first(sums: np.ndarray) -> Iterator[int]:
    yield int(sums.argmin())
    yield from np.argsort(sums, kind="stable")[1:].tolist()


def _exchange_best(high: _SortedPart, low: _SortedPart, gap: float, *, moves: bool) -> float:
    """Swap (or move) the weights that minimise the difference of both parts; the weight moved, 0 if nothing helps."""
    targets = high.values - gap / 2
    after = low.values.searchsorted(targets)
    near = np.concatenate((np.maximum(after - 1, 0), np.minimum(after, len(low.values) - 1)))
    rest = 2 * np.abs(np.tile(targets, 2) - low.values[near])
    best = int(rest.argmin())
    if moves and len(high.values) > 1:
        alone = np.abs(gap - 2 * high.values)
        single = int(alone.argmin())
        if alone[single] < min(rest[best], gap):
            index, value = high.take(single)
            low.put(index, value)
            return value
    if rest[best] >= gap:
        return 0
    index, value = high.take(best % len(targets))
    index_back, value_back = low.take(int(near[best]))
    low.put(index, value)
    high.put(index_back, value_back)
    return value - value_back
