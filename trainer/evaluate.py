"""Validation: answers to held-out prompts, graded, with pass@k and maj@k for each data source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys.protocol import DataProto
from rlsys.telemetry.validation import validation_metrics

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


def numeric_columns(batch: DataProto) -> dict[str, list[Any]]:
    """What graders returned beside the score: columns of numbers, and `pred` for majority votes."""
    names = batch.meta_info.get("reward_extra_keys", ())
    columns = {name: batch.non_tensor_batch[name] for name in names}
    return {name: list(values) for name, values in columns.items() if name == "pred" or _is_numeric(values)}


def _is_numeric(values: np.ndarray) -> bool:
    return all(isinstance(value, int | float | bool | np.number) for value in values)
