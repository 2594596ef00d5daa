"""Partition weights into parts of nearly equal sums: largest differencing in rounds, then exchanges.

Karmarkar and Karp (1982), multi-way: a state is a tuple of k partial sums; combining two states adds the largest sums
of one to the smallest of the other. Here each round combines all states at once, those of the largest spread with each
other, which takes a few array operations. The remaining difference is reduced by exchanging single weights between
the largest and the other parts.
"""

import heapq

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
        return [np.arange(num) for _ in range(num_parts)]
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


def _exchange(weights: np.ndarray, parts: list[np.ndarray], equal_size: bool) -> list[np.ndarray]:
    """Reduce the largest part by exchanges with the smallest one that has a fitting partner, while that helps.

    The indices of a part are in ascending order of their weights.
    """
    values = [weights[part] for part in parts]
    sums = np.array([own.sum() for own in values])
    close = max(sums.mean() * CLOSE, 1 if weights.dtype.kind == "i" else 0)
    tries = EXCHANGES * len(parts)
    while tries > 0:
        high = int(sums.argmax())
        for low in np.argsort(sums, kind="stable").tolist():
            gap, tries = sums[high] - sums[low], tries - 1
            if gap <= close:
                return parts
            if (pair := _best_exchange(values[high], values[low], gap, moves=not equal_size)) is not None:
                given, returned = parts[high][pair[0]], parts[low][pair[1]]
                for part, at, more in ((high, pair[0], returned), (low, pair[1], given)):
                    parts[part] = _replace(weights, parts[part], at, more)
                    values[part] = weights[parts[part]]
                    sums[part] = values[part].sum()
                break
        else:
            break
    return parts


def _replace(weights: np.ndarray, part: np.ndarray, at: slice, more: np.ndarray) -> np.ndarray:
    part = np.concatenate((part[: at.start], part[at.stop :]))
    place = int(weights[part].searchsorted(weights[more].sum()))
    return np.concatenate((part[:place], more, part[place:]))


def _best_exchange(high: np.ndarray, low: np.ndarray, gap: float, *, moves: bool) -> tuple[slice, slice] | None:
    """Places of the weights whose swap (or move) minimises the difference of both parts; None if nothing helps."""
    targets = high - gap / 2
    after = low.searchsorted(targets)
    near = np.concatenate((np.maximum(after - 1, 0), np.minimum(after, len(low) - 1)))
    rest = 2 * np.abs(np.tile(targets, 2) - low[near])
    best = int(rest.argmin())
    if moves and len(high) > 1:
        alone = np.abs(gap - 2 * high)
        single = int(alone.argmin())
        if alone[single] < min(rest[best], gap):
            return slice(single, single + 1), slice(0, 0)
    at, back = best % len(targets), int(near[best])
    return (slice(at, at + 1), slice(back, back + 1)) if rest[best] < gap else None
