"""The batch made one step ahead survives a crash between any two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.protocol import DataProto
from rlsys.utils.errors import CheckpointError
from tests.timing import scaled_s
from trainer.source import RolloutSource


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


def make() -> RolloutSource:
    return RolloutSource(
        prompts=Counted(),
        make=answer,
        prompts_per_step=2,
        num_samples=1,
        group_filter=None,
        max_staleness=1,
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
