"""The cursor: exact order, exact resume, epochs as verl's loader makes them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from rlsys.config.schema.data import DataConfig
from rlsys.data.cursor import BatchRows, Cursor, permutation
from rlsys.data.rl_sampler import AbstractSampler, SamplerCursor, create_rl_sampler
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
    cursor = Cursor(size[0], batch_size=size[1], seed=seed, shuffle=True)
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
        Cursor(3, batch_size=4, shuffle=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 7}, "the training rows have changed: num_rows is 6, but the checkpoint was saved with 7"),
        ({"dataset": "other"}, "dataset is d, but the checkpoint was saved with other"),
        ({"seed": 9}, "data.seed is 1, but the checkpoint was saved with 9; set data.seed=9, set trainer.resume"),
        ({"shuffle": False}, "data.shuffle is True, but the checkpoint was saved with False"),
        ({"position": 99}, "out of range"),
        ({"epoch": -1}, "out of range"),
        ({"extra": 1}, "no data position"),
    ],
)
def test_a_position_in_other_data_is_refused(change: dict[str, Any], message: str) -> None:
    cursor = Cursor(6, batch_size=2, seed=1, shuffle=True, dataset="d")
    kind = ConfigError if "saved with" in message else CheckpointError  # settings, not a damaged checkpoint
    with pytest.raises(kind, match=message):
        cursor.load_state_dict({**cursor.state_dict(), **change})
    assert cursor.next().epoch == 0


@pytest.mark.parametrize("kind", [Cursor, partial(SamplerCursor, RandomSampler(range(9)))])
def test_other_rows_begin_a_new_epoch_where_they_may(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    make = partial(kind, 9, batch_size=2, shuffle=True, dataset="other")
    state = make().state_dict() | {"num_rows": 6, "dataset": "d", "position": 2}
    with pytest.raises(ConfigError, match=r"set trainer\.resume_changed=true for a new epoch"):
        make().load_state_dict(state)
    cursor = make(restarts=True)
    cursor.load_state_dict(state)
    assert "num_rows is 9, but the checkpoint was saved with 6; trainer.resume_changed=true" in caplog.text
    batches = [cursor.next() for _ in range(4)]
    assert {batch.epoch for batch in batches} == {1}
    assert len({row for batch in batches for row in batch.rows}) == 8
    here = cursor.state_dict()
    cursor.load_state_dict(here)
    assert cursor.state_dict() == here


class Squares(AbstractSampler):
    """Rows in an order of its own; it can say where it is."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.num_rows, self.num_passes, self.drawn = len(data_source), 0, 0

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Any:
        while self.drawn < self.num_rows:
            self.drawn += 1
            yield (self.drawn + self.num_passes) ** 2 % self.num_rows
        self.num_passes, self.drawn = self.num_passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"num_passes": self.num_passes, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_passes, self.drawn = state["num_passes"], state["drawn"]


@pytest.mark.parametrize("kind", [RandomSampler, lambda rows: Squares(rows, None)])
@pytest.mark.parametrize("done", [0, 2, 3, 7])
def test_a_resumed_sampler_continues_as_if_nothing_happened(kind: Any, done: int) -> None:
    def new(state_of_the_process: int) -> SamplerCursor:
        torch.manual_seed(state_of_the_process)
        return SamplerCursor(kind(range(11)), 11, batch_size=3, seed=5, shuffle=True, dataset="d")

    whole = take(new(1), done + 4)
    first = new(2)
    take(first, done)
    resumed = new(3)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(resumed, 4) == whole[done:]
    assert [batch.epoch for batch in whole[:4]] == [0, 0, 0, 1]
    assert len({batch.rows for batch in whole[:4]}) == 4


def test_a_sampler_that_does_not_fit_the_rows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("class Own(list):\n    def __init__(self, data_source, data_config): pass\n")
    config = DataConfig.model_validate({"sampler": {"class_path": str(file), "class_name": "Own"}})
    with pytest.raises(ConfigError, match="class_name=Own: it must be an rlsys"):
        create_rl_sampler(config, range(3))
    assert create_rl_sampler(DataConfig(), range(3)) is None
    with pytest.raises(ConfigError, match=r"RandomSampler yields .* at least 2 positions below 3"):
        SamplerCursor(RandomSampler(range(900)), 3, batch_size=2, seed=1, shuffle=True).next()


class Reversing(Squares):
    """Its order turns with every batch that it learns from; its state is that order, not a copy."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        super().__init__(data_source, data_config)
        self.order = list(range(len(data_source)))

    def __iter__(self) -> Any:
        return iter(self.order)

    def state_dict(self) -> Any:
        return {"order": self.order}

    def load_state_dict(self, state: Any) -> None:
        self.order = list(state["order"])


def test_what_a_sampler_learns_does_not_change_the_state_of_before() -> None:
    sampler, again = Reversing(range(4), None), Reversing(range(4), None)
    cursor, resumed = (SamplerCursor(one, 4, batch_size=4, shuffle=True, dataset="d") for one in (sampler, again))
    before = cursor.state_dict()
    drawn = cursor.next().rows
    sampler.order.reverse()
    resumed.load_state_dict(json.loads(json.dumps(before)))
    assert resumed.next().rows == drawn
