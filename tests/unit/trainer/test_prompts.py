"""What is checked of rows before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import PPOConfig, SFTConfig
from rlsys.data.start_assets import build_tokenizer
from rlsys.utils.errors import DataError
from trainer.job import checked_config
from trainer.prompts import load_prompts

ROW: dict[str, Any] = {"prompt": "1+1=", "data_source": "rlsys/arithmetic", "ground_truth": "2"}


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"agent_name": "tool_agent"}, "agent_name"),
        ({"extra_info": {"need_tools_kwargs": True}}, "extra_info.need_tools_kwargs"),
        ({"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}}, "extra_info.interaction_kwargs"),
        ({"agent_name": "single_turn_agent", "extra_info": {"tools_kwargs": {}}}, None),
    ],
)
def test_rows_that_ask_for_tools_are_refused(tmp_path: Path, row: dict[str, Any], column: str | None) -> None:
    def load() -> int:
        files = [written(tmp_path / "a.jsonl", {**ROW, **row})]
        return len(load_prompts(PPOConfig(), build_tokenizer(), files, max_samples=-1))

    if column is None:
        assert load() == 1
    else:
        with pytest.raises(DataError, match=f"row 0: {column} asks for tools"):
            load()


def exits(capsys: pytest.CaptureFixture[str], schema: type, *argv: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        checked_config(["--dry-run", *argv], schema)
    return int(str(stopped.value.code)), capsys.readouterr().err


def test_a_dry_run_reads_the_first_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    build_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "grade.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ..."
    )
    rows = written(tmp_path / "own.jsonl", *[{"question": "1+1=", "answer": "2"}] * 30)
    ppo = (f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=8")
    own = (*ppo, f"data.train_files={rows}", f"reward.custom_reward_function.path={tmp_path}/grade.py")
    code, error = exits(capsys, PPOConfig, *own, "data.bad_rows=skip")
    assert code == 2
    assert "own.jsonl: column 'prompt' is missing: set data.prompt_key=question; column 'reward_model'" in error
    assert "data_source" not in error
    assert exits(capsys, PPOConfig, *own, "data.prompt_key=question", "data.answer_key=answer")[0] == 0
    qa = (*ppo, "data.prompt_key=question", "data.answer_key=answer", own[-1])
    for name, row, problem in (
        ("blank", {"question": "2+2=", "answer": " "}, "blank.jsonl, line 2: column 'answer' is blank"),
        ("none", {"question": "2+2="}, "column 'answer' is missing"),
    ):
        some = written(tmp_path / f"{name}.jsonl", {"question": "1+1=", "answer": "2"}, row)
        code, error = exits(capsys, PPOConfig, *qa, f"data.train_files={some}")
        assert (code, problem in error) == (2, True), error
        assert exits(capsys, PPOConfig, *qa, f"data.train_files={some}", "data.bad_rows=skip")[0] == 0
    bad = written(tmp_path / "bad.jsonl", ROW, {**ROW, "prompt": " "})
    code, error = exits(capsys, PPOConfig, *ppo, f"data.train_files={bad}")
    assert (code, "bad.jsonl, line 2: column 'prompt' is blank; correct it" in error) == (2, True)
    assert exits(capsys, PPOConfig, *ppo, f"data.train_files={bad}", "data.bad_rows=skip")[0] == 0
    sft = (f"model.path={model}", f"data.train_files={rows}", "data.prompt_key=question")
    code, error = exits(capsys, SFTConfig, *sft)
    assert (code, "column 'response' is missing: set data.response_key=answer" in error) == (2, True)
    assert exits(capsys, SFTConfig, *sft, "data.response_key=answer")[0] == 0
