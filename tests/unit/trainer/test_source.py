"""When batches are made, which rows the group filter keeps, and batches made ahead across a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.protocol import DataProto
from rlsys.utils.errors import CheckpointError, ConfigError
from tests.timing import scaled_s
from trainer.source import GroupFilter, Make, RolloutSource


class Counted:
    """Prompts 0, 1, 2, ... in order."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> DataProto:
        self.position += 1
        rows = torch.full((2, 1), self.position)
        return DataProto.from_dict({"prompts": rows}, non_tensors={"uid": np.array(["a", "b"], dtype=object)})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def answer(prompts: DataProto, *, step: int, call: int) -> tuple[DataProto, dict[str, float]]:
    prompts.tensors["answers"] = prompts.tensors["prompts"] * 100 + step
    return prompts, {"rollout/step": float(step)}


def make(
    *, max_staleness: int = 1, group_filter: GroupFilter | None = None, make_answers: Make = answer
) -> RolloutSource:
    return RolloutSource(
        prompts=Counted(),
        make=make_answers,
        prompts_per_step=2,
        num_samples=1,
        group_filter=group_filter,
        max_staleness=max_staleness,
        deadline_s=scaled_s(10.0),
    )


def seen(source: RolloutSource) -> tuple[list[int], list[str], dict[str, float]]:
    batch = source.next()
    answers = batch.tensors["answers"].flatten().tolist()
    return answers, batch.non_tensor_batch["uid"].tolist(), batch.meta_info["source_metrics"]


def test_a_source_taken_up_after_each_step_gives_the_batches_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make()
    expected = [seen(whole) for _ in range(4)]
    whole.close()
    batches = []
    state: dict[str, Any] = {}
    for step in range(4):
        source = make()
        if state:
            source.load(state, tmp_path / str(step - 1))
        batches.append(seen(source))
        (tmp_path / str(step)).mkdir()
        source.save_pending(tmp_path / str(step))
        state = source.state_dict()
        source.close()
    assert batches == expected
    assert [answers[0] for answers, _, _ in batches] == [101, 202, 303, 404]


def test_batches_made_ahead_by_equal_runs_are_equal_files(tmp_path: Path) -> None:
    for name, seconds in (("a", 0.25), ("b", 0.5)):

        def timed(
            prompts: DataProto, *, step: int, call: int, s: float = seconds
        ) -> tuple[DataProto, dict[str, float]]:
            return answer(prompts, step=step, call=call)[0], {"rollout/step": float(step), "reward/seconds/max": s}

        source = make(make_answers=timed)
        source.next()
        (tmp_path / name).mkdir()
        source.save_pending(tmp_path / name)
        source.close()
    assert (tmp_path / "a" / "pending.dp").read_bytes() == (tmp_path / "b" / "pending.dp").read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"answers", b"answerz")),
    ],
    ids=["missing", "empty", "cut off", "changed"],
)
def test_a_damaged_batch_made_ahead_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    source = make()
    source.next()
    source.save_pending(tmp_path)
    state = source.state_dict()
    source.close()
    damage(tmp_path / "pending.dp")
    again = make()
    with pytest.raises(CheckpointError, match=r"pending\.dp"):
        again.load(state, tmp_path)
    again.close()


@pytest.mark.parametrize(("max_staleness", "made"), [(0, [1, 2, 3]), (1, [2, 3, 4])])
def test_max_staleness_decides_how_many_steps_ahead_batches_are_made(max_staleness: int, made: list[int]) -> None:
    steps: list[int] = []

    def counting(prompts: DataProto, *, step: int, call: int) -> tuple[DataProto, dict[str, float]]:
        steps.append(step)
        return answer(prompts, step=step, call=call)

    source, counts = make(max_staleness=max_staleness, make_answers=counting), []
    for _ in range(3):
        source.next()
        source.settle()
        counts.append(len(steps))
    state = source.state_dict()
    source.close()
    assert counts == made
    assert steps == list(range(1, made[-1] + 1))
    assert state["ahead"] is (max_staleness == 1)


def keep_even(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """The rows of every second batch."""
    even = int(batch.tensors["prompts"][0]) % 2 == 0
    return batch[: 2 if even else 0], {"filter/even": float(even)}


def test_filtered_batches_are_filled_by_further_calls() -> None:
    source = make(max_staleness=0, group_filter=GroupFilter(keep_even, max_calls=2))
    assert seen(source)[0] == [201, 201]
    batch = source.next()
    assert batch.tensors["answers"].flatten().tolist() == [402, 402]
    assert batch.meta_info["source_metrics"]["rollout/num_gen_batches"] == 2.0


@pytest.mark.parametrize(("max_calls", "refused"), [(1, True), (0, False), (2, False)])
def test_too_few_rows_after_the_allowed_calls_are_a_config_error(max_calls: int, refused: bool) -> None:
    source = make(max_staleness=0, group_filter=GroupFilter(keep_even, max_calls=max_calls))
    if not refused:
        assert len(source.next()) == 2
        return
    with pytest.raises(ConfigError, match=r"after 1 generated batches only 0 of 2 prompts .*max_num_gen_batches"):
        source.next()
