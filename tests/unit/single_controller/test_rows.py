"""Who gets which rows: every row once and in order, repeated ones only behind the last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.single_controller.rows import is_rows, row_spans, split_rows, take_spans
from tests.unit.single_controller.crew import Rows

counts = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(counts, st.integers(1, 7))
def test_shares_of_many_parts_are_the_padded_whole(part_sizes: list[int], chunks: int) -> None:
    total = sum(part_sizes)
    whole = list(range(total))
    parts = [Rows(whole[sum(part_sizes[:i]) : sum(part_sizes[: i + 1])]) for i in range(len(part_sizes))]
    shares, num_padding = [], 0
    for index in range(chunks):
        spans, padded = row_spans(part_sizes, index, chunks, pads=True)
        shares.append(take_spans(parts, spans).values)
        num_padding += padded
    together = [value for share in shares for value in share]
    assert len({len(share) for share in shares}) == 1
    assert together[:total] == whole
    assert len(together) - total == num_padding == (-total % chunks if total else 0)
    assert all(value == whole[position % total] for position, value in enumerate(together))


@given(st.integers(0, 40), st.integers(1, 8))
def test_without_padding_uneven_rows_are_refused(total: int, chunks: int) -> None:
    if total % chunks:
        with pytest.raises(ValueError, match=f"{total} rows cannot be split evenly over {chunks}"):
            row_spans([total], 0, chunks, pads=False)
    else:
        shares, padding = split_rows(Rows(range(total)), chunks, pads=False)
        assert [value for share in shares for value in share.values] == list(range(total))
        assert not any(padding)


def test_only_needed_parts_are_touched() -> None:
    spans, _ = row_spans([3, 3, 2], 1, 2, pads=False)
    assert spans == [(1, 1, 3), (2, 0, 2)]


def test_a_whole_part_is_passed_on_as_it_is() -> None:
    rows = Rows([1, 2])
    assert take_spans([rows], [(0, 0, 2)]) is rows


@pytest.mark.parametrize("value", [[1, 2], "rows", 3, None, {"a": 1}])
def test_plain_values_are_no_rows(value: object) -> None:
    assert not is_rows(value)
    assert is_rows(Rows([]))
