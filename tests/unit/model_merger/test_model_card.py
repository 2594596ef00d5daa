"""The card of a merged model says what the run was."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rlsys.model_merger.model_card import write_model_card


@pytest.mark.parametrize(("path", "base"), [("org/start@v2", "org/start"), ("/models/start", None)])
def test_the_card_of_a_run(tmp_path: Path, path: str, base: str | None) -> None:
    checkpoint = tmp_path / "run" / "global_step_2" / "actor"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(
        f"actor_rollout_ref: {{model: {{path: {path}}}}}\nalgorithm: {{adv_estimator: grpo}}\n"
        "data: {train_files: openai/gsm8k:main:train}\n"
    )
    metrics = [
        {"step": 2, "critic/score/mean": 0.25, "val-core/gsm8k/acc/mean@1": 0.5, "timing_s/step": 9.0},
        {"step": 3, "critic/score/mean": 0.75},
    ]
    whole = "".join(json.dumps(line) + "\n" for line in metrics)
    (tmp_path / "run" / "metrics.jsonl").write_text(whole + '{"step": 2, "critic/sc')
    write_model_card(checkpoint, tmp_path, title="mine")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.tags) == (base, ["rlsys", "grpo"])
    lines = [line.removeprefix("| ").removesuffix(" |") for line in card.text.splitlines() if line.startswith("| ")]
    rows = dict(line.split(" | ") for line in lines[2:])
    assert rows == {
        "start": path,
        "method": "grpo",
        "data": "openai/gsm8k:main:train",
        "step": "2",
        "critic/score/mean": "0.25",
        "val-core/gsm8k/acc/mean@1": "0.5",
    }


def test_a_checkpoint_without_a_run_has_no_card(tmp_path: Path) -> None:
    write_model_card(tmp_path / "ranks", tmp_path, title="mine")
    assert not (tmp_path / "README.md").exists()
