"""What the parity probe reports of log-probs that are no numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlsys.config.schema.rollout import ParityConfig
from rlsys.data.rows import PromptRow
from rlsys.protocol import DataProto
from rlsys.telemetry.metrics import StageTimer
from rlsys.types import SamplingParams
from trainer.parity import ParityProbe
from trainer.residency import SYNC, Residency

ONES = torch.ones(1, 2, dtype=torch.int64)
ROWS = {"prompts": ONES, "responses": ONES, "response_mask": ONES, "input_ids": torch.ones(1, 4, dtype=torch.int64)}
ROWS |= {name: torch.ones(1, 4, dtype=torch.int64) for name in ("attention_mask", "position_ids")}


@pytest.mark.parametrize(("scored", "is_wrong"), [(-0.5, False), (-3.0, True), (float("nan"), True)])
def test_scores_beyond_the_limits_and_those_that_are_no_numbers_are_a_problem(scored: float, is_wrong: bool) -> None:
    def scores(value: float, name: str) -> Any:
        return lambda rows: DataProto.from_dict({name: torch.full((1, 2), value)})

    drawn = DataProto.from_dict({**ROWS, "rollout_log_probs": torch.full((1, 2), -0.5)})
    graded: Any = SimpleNamespace(generate=lambda rows: (drawn, {}), sampling=SamplingParams(2), pad_token_id=0)
    score = scores(scored, "rollout_log_probs")
    actor: Any = SimpleNamespace(compute_log_prob=scores(-0.5, "old_log_probs"))
    prompts: Any = [PromptRow("a", "sums", {}, {}, token_ids=(1, 2))]
    residency = Residency({}, StageTimer())
    residency.enter(SYNC)
    report = ParityProbe(ParityConfig(), prompts, graded, 2, score, actor, residency).run(0)
    assert bool(report.problem) == is_wrong
