"""Who gets which rows: every row once and in order, repeated ones only behind the last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.single_controller.rows import is_rows, join_rows, split_rows
from tests.unit.single_controller.crew import Rows


@given(st.integers(0, 40), st.integers(1, 8))
def test_shares_are_the_padded_whole(total: int, chunks: int) -> None:
    shares, padding = split_rows(Rows(range(total)), chunks, pads=True)
    together = [value for share in shares for value in share.values]
    assert len({len(share) for share in shares}) == 1
    assert together[:total] == list(range(total))
    assert len(together) - total == sum(padding) == (-total % chunks if total else 0)
    assert all(value == position % total for position, value in enumerate(together))
    kept = [value for share, repeated in zip(shares, padding) for value in share.values[: len(share) - repeated]]
    assert kept == list(range(total))


@given(st.integers(0, 40), st.integers(1, 8))
def test_without_padding_uneven_rows_are_refused(total: int, chunks: int) -> None:
    if total % chunks:
        with pytest.raises(ValueError, match=f"{total} rows cannot be split evenly over {chunks}"):
            split_rows(Rows(range(total)), chunks, pads=False)
    else:
        shares, padding = split_rows(Rows(range(total)), chunks, pads=False)
        assert [value for share in shares for value in share.values] == list(range(total))
        assert not any(padding)


def test_the_only_filled_part_is_passed_on_as_it_is() -> None:
    rows = Rows([1, 2])
    assert join_rows([Rows([]), rows]) is rows
    assert join_rows([rows, Rows([]), Rows([3])]).values == [1, 2, 3]
    assert len(join_rows([Rows([]), Rows([])])) == 0


@pytest.mark.parametrize("value", [[1, 2], "rows", 3, None, {"a": 1}])
def test_plain_values_are_no_rows(value: object) -> None:
    assert not is_rows(value)
    assert is_rows(Rows([]))
