"""Arithmetic on boxes of tensors (a start and a shape)."""

from collections.abc import Sequence


def slices(start: Sequence[int], shape: Sequence[int]) -> tuple[int | slice, ...]:
    """The index of the box of `shape` from `start`; leading entries of `start` beyond `shape` are indices."""
    extra = len(start) - len(shape)
    return (*start[:extra], *(slice(at, at + n) for at, n in zip(start[extra:], shape, strict=True)))


def overlap(
    start: Sequence[int], shape: Sequence[int], other_start: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Start and shape of what two boxes share, or None."""
    first = tuple(map(max, start, other_start))
    ends = [min(a + n, b + m) for a, n, b, m in zip(start, shape, other_start, other_shape, strict=True)]
    extent = tuple(end - f for end, f in zip(ends, first, strict=True))
    return None if min(extent, default=1) <= 0 else (first, extent)


def relative(first: Sequence[int], start: Sequence[int]) -> tuple[int, ...]:
    """`first` as counted from `start`."""
    return tuple(f - s for f, s in zip(first, start, strict=True))
