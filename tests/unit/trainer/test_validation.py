"""Validation: which prompts are answered how, and what becomes of the answers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlsys.config import load_config
from rlsys.data.dataset import PromptDataset
from rlsys.data.rows import PromptRow
from rlsys.protocol import DataProto
from rlsys.rewards.manager import Graded
from rlsys.telemetry.metrics import StageTimer
from rlsys.types import SamplingParams
from trainer.evaluation import Validation, numeric_columns
from trainer.generation import GradedRollout

ROLLOUT = "actor_rollout_ref.rollout"


class Grader:
    """One point for an answer that is the last token of its prompt."""

    def grade(self, data: DataProto) -> Graded:
        scores = (data.tensors["responses"][:, :1] == data.tensors["prompts"][:, -1:]).float()
        extra = {
            f"of_{len(data)}_rows": scores[:, 0].numpy(),
            "acc": scores[:, 0].numpy(),
            "pred": np.array([str(i) for i in range(len(data))], dtype=object),
        }
        return Graded(scores, extra, {"reward/num": float(len(data))})


def graded_rollout(seen: list[DataProto], *, greedy_baseline: bool = False) -> GradedRollout:
    """Answers are the row's number, so that one answer of a prompt n is right where n answers are drawn."""

    def generate(rows: DataProto) -> tuple[DataProto, dict[str, float]]:
        seen.append(DataProto(rows.batch, meta_info=dict(rows.meta_info)))
        responses = torch.arange(len(rows))[:, None]
        tensors = {"prompts": rows.tensors["prompts"], "responses": responses}
        return DataProto.from_dict(tensors, non_tensors=rows.non_tensor_batch, meta_info=dict(rows.meta_info)), {}

    sampling = SamplingParams(max_new_tokens=1, temperature=0.7, seed=5)
    return GradedRollout(generate, cast(Any, Grader()), sampling, 2, greedy_baseline, 0, StageTimer(), None)


def prompts_up_to(count: int) -> PromptDataset:
    task = {"data_source": "numbers", "reward_model": {"ground_truth": ""}, "extra_info": {}}
    return PromptDataset([PromptRow("?", **task, index=n, token_ids=[7, n]) for n in range(count)])


def test_validation_asks_by_its_own_sampling_and_hands_over_all_answers() -> None:
    cfg = load_config(
        [
            "--config-name=quickstart",
            f"{ROLLOUT}.val_kwargs.n=2",
            f"{ROLLOUT}.val_kwargs.do_sample=true",
            f"{ROLLOUT}.val_kwargs.temperature=0.25",
            "data.val_batch_size=2",
        ]
    )
    seen, dumped = list[DataProto](), list[tuple[int, int]]()
    rollout, timer = graded_rollout(seen), StageTimer()
    run = Validation(
        cfg,
        prompts_up_to(3),
        replace(rollout, stage=timer),
        lambda batch, step: dumped.append((len(batch), step)),
        seed=1,
    )
    metrics = run.run(step=4)
    assert [len(rows) for rows in seen] == [4, 2]
    assert [rows.meta_info["temperature"] for rows in seen] == [0.25, 0.25]
    assert seen[0].meta_info["seed"] != seen[1].meta_info["seed"]
    assert dumped == [(6, 4)]
    assert set(timer.drain()) == {"testing_gen", "testing_reward"}
    assert metrics["val-core/numbers/acc/mean@2"] == pytest.approx(1 / 6)
    assert metrics["val-aux/numbers/of_2_rows/mean@2"] == 0.0  # the batches' graders returned different keys


def test_only_numbers_and_predictions_are_aggregated() -> None:
    batch = cast(
        DataProto,
        SimpleNamespace(
            meta_info={"reward_extra_keys": ["acc", "lost", "note", "part", "pred"]},
            non_tensor_batch={
                "lost": np.array([0.0, None], dtype=object),  # of an answer without a score
                "reward_status": np.array(["error", "ok"], dtype=object),
                "acc": np.array([1, True]),
                "note": np.array(["a", "b"], dtype=object),
                "part": np.array([None, 0.5], dtype=object),  # of one data source only
                "pred": np.array(["4", "5"], dtype=object),
            },
        ),
    )
    assert set(numeric_columns(batch)) == {"acc", "part", "pred"}


def test_a_greedy_baseline_is_scored_for_each_answer() -> None:
    seen: list[DataProto] = []
    rollout = graded_rollout(seen, greedy_baseline=True)
    prompts = DataProto.from_dict(
        {"prompts": torch.tensor([[0], [9]])}, non_tensors={"uid": np.array(["a", "b"], dtype=object)}
    )
    batch, metrics = rollout.make(prompts, step=3, call=1)
    assert [rows.meta_info["do_sample"] for rows in seen] == [True, False]
    assert seen[0].meta_info["seed"] == 5 + (1 << 32)
    assert batch.tensors["reward_baselines"].tolist() == [1, 1, 0, 0]
    assert batch.tensors["token_level_scores"][:, 0].tolist() == [1, 0, 0, 0]
    assert (batch.meta_info["temperature"], batch.meta_info["global_steps"]) == (0.7, 3)
    assert "seed" not in batch.meta_info
    assert metrics == {"reward/num": 4.0}
