"""Partition of weights into parts of nearly equal sums: largest differencing in rounds, then exchanges.

Karmarkar and Karp (1982), multi-way: a state is a tuple of k partial sums; combining two states adds the largest sums
of one to the smallest of the other. Here each round combines all states at once, those of the largest spread with each
other, so that the work is a few array operations. What difference is left is closed by exchanging single weights
between the fullest and the other parts.
"""

from __future__ import annotations

import heapq

import numpy as np

CLOSE = 1e-4
EXCHANGES = 4


def balanced_partitions(weights: np.ndarray, num_parts: int, *, equal_size: bool = False) -> list[np.ndarray]:
    """Indices (ascending) of each part; ValueError if there are fewer weights than parts or they do not divide.

    `equal_size` gives all parts equally many. Deterministic: equal weights are taken in their order.
    """
    num = len(weights)
    if num_parts < 1 or (equal_size and num % num_parts) or (not equal_size and num < num_parts):
        raise ValueError(f"{num} weights do not make {num_parts} parts{' of equal size' if equal_size else ''}")
    if num_parts == 1 or num == 0:
        return [np.arange(num) if part == 0 else np.empty(0, np.int64) for part in range(num_parts)]
    weights = np.asarray(weights)
    falling = np.argsort(-weights, kind="stable")
    assign = _difference if equal_size else _longest_first
    owner = assign(weights[falling], num_parts)
    rising = falling[::-1]
    grouped = rising[np.argsort(owner[::-1], kind="stable")]
    parts = np.split(grouped, np.bincount(owner, minlength=num_parts).cumsum()[:-1])
    return [np.sort(part) for part in _exchange(weights, parts, equal_size)]


def _difference(falling: np.ndarray, num_parts: int) -> np.ndarray:
    """The part of each of the falling weights by largest differencing in rounds; all parts get equally many."""
    state, slot = np.divmod(np.arange(len(falling)), num_parts)
    sums = falling.reshape(-1, num_parts)
    while len(sums) > 1:
        ranked = np.argsort(sums[:, -1] - sums[:, 0], kind="stable")
        place = np.empty_like(ranked)
        place[ranked] = np.arange(len(ranked))
        second = place % 2 == 1
        combined = np.zeros((-(-len(sums) // 2), num_parts), sums.dtype)
        combined += sums[ranked[0::2]]
        combined[: len(sums) // 2] += sums[ranked[1::2], ::-1]
        sorting = np.argsort(-combined, axis=1, kind="stable")
        rank = np.empty_like(sorting)
        np.put_along_axis(rank, sorting, np.arange(num_parts)[None], axis=1)
        slot = np.where(second[state], num_parts - 1 - slot, slot)
        state = place[state] // 2
        slot = rank[state, slot]
        sums = np.take_along_axis(combined, sorting, axis=1)
    return slot


def _longest_first(falling: np.ndarray, num_parts: int) -> np.ndarray:
    """The part of each of the falling weights, always the emptiest so far; parts get as many as come out."""
    heap = [(0, 0, part) for part in range(num_parts)]
    owner = []
    for weight in falling.tolist():
        total, count, part = heap[0]
        heapq.heapreplace(heap, (total + weight, count + 1, part))
        owner.append(part)
    return np.array(owner)


class _Part:
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
    """Lower the fullest part by exchanges with the emptiest that has a fitting partner, while that helps."""
    parts = [_Part(weights, part) for part in indices]
    sums = np.array([part.values.sum() for part in parts])
    close = max(sums.mean() * CLOSE, 1 if weights.dtype.kind == "i" else 0)
    if sums.max() - sums.min() <= close:
        return indices
    tries = EXCHANGES * len(parts)
    while tries > 0:
        high = int(sums.argmax())
        for low in np.argsort(sums, kind="stable").tolist():
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


def _exchange_best(high: _Part, low: _Part, gap: float, *, moves: bool) -> float:
    """Swap (or move) what leaves the least difference between both parts; how much moved, 0 if nothing helps."""
    targets = high.values - gap / 2
    after = np.minimum(low.values.searchsorted(targets), len(low.values) - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(low.values[before] - targets) <= np.abs(low.values[after] - targets)
    partner = np.where(nearer, before, after)
    rest = np.abs(gap - 2 * (high.values - low.values[partner]))
    give = int(rest.argmin())
    if moves and len(high.values) > 1:
        alone = np.abs(gap - 2 * high.values)
        single = int(alone.argmin())
        if alone[single] < min(rest[give], gap):
            index, value = high.take(single)
            low.put(index, value)
            return value
    if rest[give] >= gap:
        return 0
    index, value = high.take(give)
    index_back, value_back = low.take(int(partner[give]))
    low.put(index, value)
    high.put(index_back, value_back)
    return value - value_back
