"""Batches of a synchronous run: which rows the group filter keeps, and where a restarted run continues."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.protocol import DataProto, object_array
from rlsys.utils.errors import ConfigError
from trainer.overlap import OverlapMeter
from trainer.source import GroupFilter, RolloutSource, joined


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
    return prompts, {"rollout/issued": 2.0, "rollout/pending": float(call)}


def make(*, group_filter: GroupFilter | None = None) -> RolloutSource:
    rollout: Any = SimpleNamespace(make=answer, num_answers=1)
    return RolloutSource(Counted(), rollout, prompts_per_step=2, group_filter=group_filter)


def seen(source: RolloutSource) -> tuple[list[int], list[str], dict[str, float]]:
    batch = source.next()
    answers = batch.tensors["answers"].flatten().tolist()
    return answers, batch.non_tensor_batch["uid"].tolist(), batch.meta_info["source_metrics"]


def test_a_source_taken_up_after_each_step_gives_the_batches_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make()
    expected = [seen(whole) for _ in range(4)]
    batches = []
    state: dict[str, Any] = {}
    for _ in range(4):
        source = make()
        if state:
            source.load(state, tmp_path)
        batches.append(seen(source))
        state = source.save(tmp_path)
    assert batches == expected
    assert [answers[0] for answers, _, _ in batches] == [101, 202, 303, 404]
    assert not list(tmp_path.iterdir())


def keep_even(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """The rows of every second batch."""
    even = int(batch.tensors["prompts"][0]) % 2 == 0
    return batch[: 2 if even else 0], {"filter/even": float(even)}


def test_filtered_batches_are_filled_by_further_calls() -> None:
    source = make(group_filter=GroupFilter(keep_even, max_calls=2))
    assert seen(source)[0] == [201, 201]
    batch = source.next()
    assert batch.tensors["answers"].flatten().tolist() == [402, 402]
    counts = {"rollout/num_gen_batches": 2.0, "rollout/issued": 4.0, "rollout/pending": 1.0, "filter/even": 1.0}
    assert batch.meta_info["source_metrics"] == counts


def test_a_step_has_what_the_fleet_counted_in_the_push_and_the_validation_before_it() -> None:
    now: dict[str, float] = {}
    fleet: Any = SimpleNamespace(metrics=lambda: {f"rollout/{name}": number for name, number in now.items()})
    rollout: Any = SimpleNamespace(make=answer, num_answers=1)
    meter = OverlapMeter(fleet)
    source = RolloutSource(Counted(), rollout, prompts_per_step=2, group_filter=None, counted=meter.new_counts)
    steps = []
    for came, left, issued, ready in ((1, 0, 50, 2), (1, 1, 100, 1), (1, 1, 150, 1)):
        now |= {"joined": came, "left": left, "issued": issued, "replicas_ready": ready}
        counts = source.next().meta_info["source_metrics"]
        steps.append([counts[f"rollout/{name}"] for name in ("joined", "left", "issued", "replicas_ready")])
    assert steps == [[1, 0, 2, 2], [0, 1, 2, 1], [0, 0, 2, 1]]


@pytest.mark.parametrize(("max_calls", "refused"), [(1, True), (0, False), (2, False)])
def test_too_few_rows_after_the_allowed_calls_are_a_config_error(max_calls: int, refused: bool) -> None:
    source = make(group_filter=GroupFilter(keep_even, max_calls=max_calls))
    if not refused:
        assert len(source.next()) == 2
        return
    with pytest.raises(ConfigError, match=r"after 1 generated batches only 0 of 2 prompts .*max_num_gen_batches"):
        source.next()


def test_a_filter_without_a_limit_says_that_it_keeps_too_few(caplog: pytest.LogCaptureFixture) -> None:
    calls = iter(range(25))

    def keep_the_last(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        return batch[: 2 if next(calls) == 24 else 0], {}

    with caplog.at_level("WARNING"):
        make(group_filter=GroupFilter(keep_the_last, max_calls=0)).next()
    messages = [record.getMessage().partition(" generated")[0] for record in caplog.records]
    assert messages == ["after 10", "after 20"]


def graded(status: list[str] | None = None, **extra: list[object]) -> DataProto:
    """Rows with what their grader returned, and whether it did."""
    columns = {name: object_array(values) for name, values in extra.items()}
    columns |= {} if status is None else {"reward_status": object_array(status)}
    return DataProto.from_dict({"x": torch.zeros(2)}, columns, {"reward_extra_keys": sorted(columns)})


def ended(ends: list[str], **extra: list[object]) -> DataProto:
    """Episodes by how they ended, with what was returned for them."""
    columns = {name: object_array(values) for name, values in (extra | {"episode_end": ends}).items()}
    return DataProto.from_dict({"x": torch.zeros(2)}, columns, {"reward_extra_keys": sorted(extra)})


def test_answers_without_a_score_have_0_where_others_have_numbers() -> None:
    """As within a batch; else an estimator of several rewards ends the run when all answers of a prompt are lost."""
    whole = joined([graded(["error", "timeout"]), graded(["ok", "ok"], judge=[1.0, 0.5], note=["a", "b"])])
    assert list(whole.non_tensor_batch["judge"]) == [0.0, 0.0, 1.0, 0.5]
    assert list(whole.non_tensor_batch["note"]) == [None, None, "a", "b"]
    other = joined([graded(["ok", "ok"], judge=[1.0, 0.5]), graded(["ok", "error"], acc=[1.0, 0.0])])
    assert list(other.non_tensor_batch["judge"]) == [1.0, 0.5, None, 0.0]
    episodes = joined([ended(["context", "length"]), ended(["stop", "stop"], acc=[1.0, 0.0])])
    assert list(episodes.non_tensor_batch["acc"]) == [0.0, 0.0, 1.0, 0.0]


def test_episodes_that_their_workflow_scored_have_no_accuracy_beside_graded_ones() -> None:
    parts = [ended(["stop", "length"]), ended(["stop", "stop"], acc=[None, 1.0], judge=[0.5, 1.0])]
    columns = joined(parts).non_tensor_batch
    assert list(columns["acc"]) == [None, 0.0, None, 1.0]
    assert list(columns["judge"]) == [0.0, 0.0, 0.5, 1.0]
