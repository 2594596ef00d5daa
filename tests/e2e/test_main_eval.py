"""The evaluation job: metrics on the console and in a file, and a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy
from trainer.main_eval import main


def test_an_evaluation_writes_its_metrics(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    argv = [
        f"actor_rollout_ref.model.path={toy.model}",
        f"data.val_files={toy.val}",
        f"reward.custom_reward_function.path={toy.grader}",
        "reward.num_workers=1",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "trainer.backend=local",
        f"trainer.default_local_dir={out}",
    ]
    assert main(argv) == 0
    metrics = json.loads((out / "evaluation.json").read_text())
    printed = capsys.readouterr().out
    core = [name for name in metrics if name.startswith("val-core/")]
    assert core
    assert all(f"{name} = {metrics[name]:.4f}" in printed for name in core)
    assert "rlsys: done in" in printed
    assert f"evaluation {out / 'evaluation.json'}" in printed
    assert main([*argv, "trainer.device=cuda"]) == 2
