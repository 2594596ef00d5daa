"""Validation: answers to held-out prompts, graded, with pass@k and maj@k for each data source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlsys.config import EvalConfig, PPOConfig
from rlsys.data.collate import collate_prompts
from rlsys.data.dataset import PromptDataset
from rlsys.protocol import DataProto
from rlsys.telemetry.validation import validation_metrics
from trainer.generation import Answers, validation_sampling

Answer = Callable[[DataProto, int, int], DataProto]
"""(prompts, step, number of the batch) -> graded answers."""
Dump = Callable[[DataProto, int], None]


@dataclass(frozen=True)
class Evaluator:
    """`batches()` gives the validation prompts, each repeated for its answers; `dump` writes what was said."""

    batches: Callable[[], list[DataProto]]
    answer: Answer
    dump: Dump
    seed: int

    def run(self, step: int) -> dict[str, float]:
        """`val-core/*` and `val-aux/*` by verl's names."""
        graded = [self.answer(prompts, step, call) for call, prompts in enumerate(self.batches())]
        whole = graded[0] if len(graded) == 1 else DataProto.concat(graded)
        self.dump(whole, step)
        infos = {"reward": whole.tensors["token_level_scores"].sum(-1).tolist(), **numeric_columns(whole)}
        return validation_metrics(
            [str(source) for source in whole.non_tensor_batch["data_source"]],
            [str(uid) for uid in whole.non_tensor_batch["uid"]],
            infos,
            seed=self.seed,
        )


def validation(
    cfg: PPOConfig | EvalConfig, dataset: PromptDataset, answers: Answers, dump: Dump, *, seed: int
) -> Evaluator:
    """Validation by a fleet and graders, with the sampling of val_kwargs."""
    asking = replace(
        answers,
        sampling=validation_sampling(cfg),
        num_answers=cfg.actor_rollout_ref.rollout.val_kwargs.n,
        greedy_baseline=False,
    )
    size = cfg.data.val_batch_size or len(dataset)

    def batches() -> list[DataProto]:
        return [
            collate_prompts(
                [dataset[i] for i in range(start, min(start + size, len(dataset)))],
                prompt_length=cfg.data.max_prompt_length,
                pad_token_id=answers.pad_token_id,
            )
            for start in range(0, len(dataset), size)
        ]

    def answer(prompts: DataProto, step: int, call: int) -> DataProto:
        return asking.make(prompts, step=step, call=call)[0]

    return Evaluator(batches=batches, answer=answer, dump=dump, seed=seed)


def numeric_columns(batch: DataProto) -> dict[str, list[Any]]:
    """What graders returned beside the score: columns of numbers, and `pred` for majority votes."""
    names = batch.meta_info.get("reward_extra_keys", ())
    columns = {name: batch.non_tensor_batch[name] for name in names}
    return {name: list(values) for name, values in columns.items() if name == "pred" or _is_numeric(values)}


def _is_numeric(values: np.ndarray) -> bool:
    return all(isinstance(value, int | float | bool | np.number) for value in values)
