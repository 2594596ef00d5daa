"""Checksums against their definition in Python integers, over any cut of a tensor."""

import ctypes
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.types import Box
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import add_checksums, box_checksum, digest, row_blocks
from rlsys.weights.checksum_cpu import ROW_STREAM, WORD_STREAM
from rlsys.weights.layout import view_of
from rlsys.weights.verify import merge_rank_checksums

MASK = (1 << 64) - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float16]


def odd_hash(stream: int, number: int) -> int:
    x = (number * 0x9E3779B97F4A7C15 + stream) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def reference(tensor: torch.Tensor) -> int:
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.reshape(1, 1)
    total = 0
    for r, row in enumerate(rows):
        data = bytes(row.contiguous().view(torch.uint8).tolist())
        data += bytes(-len(data) % 8)
        for q in range(len(data) // 8):
            word = int.from_bytes(data[8 * q : 8 * q + 8], "little")
            total += word * odd_hash(WORD_STREAM, q) * odd_hash(ROW_STREAM, r)
    return total & MASK


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).abs().to(dtype)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 9), min_size=0, max_size=4), st.integers(0, 10**6))
def test_the_whole_is_the_definition_and_the_sum_of_any_parts(dtype: torch.dtype, sizes: list[int], seed: int) -> None:
    shape, rng = tuple(sizes), random.Random(seed)
    tensor = random_tensor(shape, dtype, seed)
    whole = box_checksum(tensor, (0,) * len(shape), shape)
    assert whole == reference(tensor)
    parts = [((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 4)):
        start, size = parts.pop(rng.randrange(len(parts)))
        if not (dims := [d for d in range(len(size)) if size[d] > 1]):
            parts.append((start, size))
            continue
        dim = rng.choice(dims)
        cut = rng.randint(1, size[dim] - 1)
        low, high, at = list(size), list(size), list(start)
        low[dim], high[dim], at[dim] = cut, size[dim] - cut, start[dim] + cut
        parts += [(start, tuple(low)), (tuple(at), tuple(high))]
    sums = [box_checksum(view_of(tensor, start, size), start, shape) for start, size in parts]
    assert add_checksums(sums) == whole
    boxes = [((Box("t", start, size), s),) for (start, size), s in zip(parts, sums, strict=True)]
    assert merge_rank_checksums([*boxes, boxes[0]], {"t": shape}) == {"t": whole}


@given(st.integers(0, 10**6))
def test_flipped_bits_and_permuted_elements_change_the_checksum(seed: int) -> None:
    rng = random.Random(seed)
    tensor = random_tensor((6, 10), torch.float32, seed)
    before = box_checksum(tensor, (0, 0), (6, 10))
    bits = tensor.clone().view(torch.int32)
    bits[rng.randrange(6), rng.randrange(10)] ^= 1 << rng.randrange(31)
    assert box_checksum(bits.view(torch.float32), (0, 0), (6, 10)) != before
    for changed in (tensor.flip(0), tensor.flip(1), tensor.roll(2, 1), tensor.reshape(10, 6).t()):
        assert box_checksum(changed, (0, 0), (6, 10)) != before


def test_views_at_odd_offsets_and_empty_boxes() -> None:
    storage = random_tensor((41,), torch.bfloat16, 0)
    view = storage[1:].view(4, 10)
    assert box_checksum(view, (0, 0), (4, 10)) == reference(view.clone())
    assert box_checksum(storage[:0], (41,), (41,)) == 0


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 7), min_size=0, max_size=4), st.integers(0, 10**6))
def test_the_rows_that_a_gpu_reads_are_the_rows_of_the_box(dtype: torch.dtype, sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    tensor = random_tensor(tuple(sizes), dtype, seed)
    tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1) if rng.random() < 0.3 and len(sizes) > 2 else tensor
    start = [rng.randint(0, n - 1) for n in sizes]
    size = [rng.randint(1, n - s) for n, s in zip(sizes, start, strict=True)]
    values = view_of(tensor, start, size)
    total = 0
    for part in row_blocks(values, start, sizes):
        words = memory_at(part.address, (part.rows - 1) * part.pitch + part.width)
        for row in range(part.rows):
            line = words[row * part.pitch :][: part.width]
            for at in range(0, part.width, part.word_bytes):
                column = part.first_column + at
                word = int.from_bytes(line[at : at + part.word_bytes], "little") << column % 8 * 8
                total += word * odd_hash(WORD_STREAM, column // 8) * odd_hash(ROW_STREAM, part.first_row + row)
    assert total & MASK == box_checksum(values, start, sizes)


def memory_at(address: int, num_bytes: int) -> bytes:
    return bytes((ctypes.c_ubyte * num_bytes).from_address(address))


def test_merging_requires_equal_replicas_and_no_gaps() -> None:
    low, high = Box("t", (0,), (3,)), Box("t", (3,), (2,))
    with pytest.raises(WeightTransferError, match="different values"):
        merge_rank_checksums([((low, 1),), ((low, 2),)], {"t": (5,)})
    with pytest.raises(WeightTransferError, match=r"no rank holds .*start=\(3,\)"):
        merge_rank_checksums([((low, 1),)], {"t": (5,)})
    with pytest.raises(WeightTransferError, match="overlaps"):
        merge_rank_checksums([((low, 1), (Box("t", (2,), (3,)), 1))], {"t": (5,)})
    assert merge_rank_checksums([((high, MASK),), ((low, 2),)], {"t": (5,)}) == {"t": 1}


def test_digest_depends_on_names_and_sums_only() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len({digest(sums) for sums in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, {"c": 1, "b": 2})}) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_long_rows_add_up_and_alignment_does_not_matter(dtype: torch.dtype) -> None:
    values = torch.randint(-100, 100, (3, 200), generator=torch.Generator().manual_seed(1)).abs().to(dtype)
    whole = box_checksum(values, (0, 0), (3, 200))
    cuts = [(0, 64), (64, 131), (131, 200)]
    parts = [box_checksum(values[:, a:b], (0, a), (3, 200)) for a, b in cuts]
    assert sum(parts) & MASK == whole == reference(values)
    shifted = torch.cat([values.flatten()[:1], values.flatten()])[1:].view(3, 200)
    assert box_checksum(shifted, (0, 0), (3, 200)) == whole
