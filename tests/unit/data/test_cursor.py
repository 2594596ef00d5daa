"""The cursor: exact order, exact resume, epochs as verl's loader makes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.data.cursor import BatchRows, Cursor, permutation
from rlsys.utils.errors import CheckpointError, ConfigError

sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def take(cursor: Cursor, num: int) -> list[BatchRows]:
    return [cursor.next() for _ in range(num)]


def test_the_order_is_fixed_for_ever() -> None:
    assert permutation(8, seed=1, epoch=0).tolist() == [2, 4, 7, 5, 0, 6, 3, 1]
    assert permutation(8, seed=1, epoch=1).tolist() != permutation(8, seed=1, epoch=0).tolist()
    assert permutation(8, seed=2, epoch=0).tolist() != permutation(8, seed=1, epoch=0).tolist()


@given(sizes, st.integers(0, 2**31), st.booleans(), st.integers(0, 12))
def test_a_resumed_cursor_continues_as_if_nothing_happened(
    size: tuple[int, int], seed: int, shuffle: bool, done: int
) -> None:
    def new() -> Cursor:
        return Cursor(size[0], batch_size=size[1], seed=seed, shuffle=shuffle, dataset="d")

    whole = take(new(), done + 7)
    first = new()
    take(first, done)
    resumed = new()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(resumed, 7) == whole[done:]


@given(sizes, st.integers(0, 1000))
def test_an_epoch_takes_no_row_twice_and_drops_what_fills_no_batch(size: tuple[int, int], seed: int) -> None:
    cursor = Cursor(size[0], batch_size=size[1], seed=seed)
    for epoch in range(3):
        steps = take(cursor, size[0] // size[1])
        rows = [r for s in steps for r in s.rows]
        assert {s.epoch for s in steps} == {epoch}
        assert len(rows) == len(set(rows)) == size[0] - size[0] % size[1]
        assert set(rows) <= set(range(size[0]))


def test_without_shuffling_rows_come_as_they_are() -> None:
    cursor = Cursor(5, batch_size=2, shuffle=False)
    assert take(cursor, 3) == [BatchRows(0, (0, 1)), BatchRows(0, (2, 3)), BatchRows(1, (0, 1))]


def test_another_batch_size_continues_from_the_same_row() -> None:
    one = Cursor(6, batch_size=2, shuffle=False)
    take(one, 1)
    two = Cursor(6, batch_size=3, shuffle=False)
    two.load_state_dict(one.state_dict())
    assert two.next().rows == (2, 3, 4)


def test_a_dataset_smaller_than_a_batch_is_a_config_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"3 usable rows, fewer than a batch of 4: set data\.train_batch_size"):
        Cursor(3, batch_size=4)
    with pytest.raises(ConfigError, match="at least 1"):
        Cursor(3, batch_size=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 7}, "the training rows are others: num_rows is 6, but the checkpoint was saved with 7"),
        ({"dataset": "other"}, "dataset is d, but the checkpoint was saved with other"),
        ({"seed": 9}, "data.seed is 1, but the checkpoint was saved with 9; set data.seed=9, or start over"),
        ({"shuffle": False}, "data.shuffle is True, but the checkpoint was saved with False"),
        ({"position": 99}, "out of range"),
        ({"epoch": -1}, "out of range"),
        ({"extra": 1}, "no data position"),
    ],
)
def test_a_position_in_other_data_is_refused(change: dict[str, Any], message: str) -> None:
    cursor = Cursor(6, batch_size=2, seed=1, dataset="d")
    with pytest.raises(CheckpointError, match=message):
        cursor.load_state_dict({**cursor.state_dict(), **change})
    assert cursor.next().epoch == 0
