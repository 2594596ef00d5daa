"""The command that scores rows by a reward function, without a model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.main_reward import main

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "broken": raise ValueError("no number in it")
    return {"score": float(solution_str == str(ground_truth)) + bonus, "source": data_source}
def prompts_only(prompts): return 1.0
"""


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(REWARD)
    return str(tmp_path / "reward.py")


def rows(folder: Path, *values: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, values)))
    return str(folder / "rows.jsonl")


def test_dumped_rollouts_are_scored_with_their_errors(
    tmp_path: Path, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dumped = ({"input": "1+1", "output": output, "gts": "2", "score": 0.0} for output in ("2", "3", "broken"))
    assert main([reward, rows(tmp_path, *dumped), '--reward_kwargs={"bonus": 0.5}', "--num_workers=0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["0", "1.5"]
    assert "'3' for '2'" in lines[1]
    assert "source=custom" in lines[1]
    assert "error" in lines[2]
    assert "ValueError: no number in it" in lines[2]
    assert lines[3] == "3 rows: mean 1, from 0.5 to 1.5; 1 errors, 0 timeouts"


def test_the_ground_truths_of_a_data_file_are_scored_as_answers(
    tmp_path: Path, reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path, {"prompt": "1+1", "reward_model": {"ground_truth": 2}, "data_source": "sums"}, {"answer": 3})
    assert main([reward, data]) == 0
    out = capsys.readouterr().out
    assert "source=sums" in out
    assert out.endswith("2 rows: mean 1, from 1 to 1; 0 errors, 0 timeouts\n")
    assert main([reward, rows(tmp_path, {"target": 3}), "--answer_key=target", "--limit=1"]) == 0
    assert main([reward, rows(tmp_path, {"ground_truth": 3}, {"reward_model": "rule", "answer": 3})]) == 0


def test_wrong_arguments_are_refused(tmp_path: Path, reward: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([reward, rows(tmp_path, {"question": "1+1"})]) == 2
    assert "no ground truth, only question: set --answer_key" in capsys.readouterr().err
    assert main([reward, rows(tmp_path, {"answer": 3}), "--name=prompts_only"]) == 2
    assert "prompts_only(prompts) is called with data_source" in capsys.readouterr().err
    assert main([reward, str(tmp_path / "none.jsonl")]) == 2
    for wrong in ("--limit=-1", "--reward_kwargs=[1]"):
        with pytest.raises(SystemExit, match="2"):
            main([reward, rows(tmp_path, {"answer": 3}), wrong])


def test_neither_torch_nor_transformers_is_imported() -> None:
    heavy = "{'torch', 'transformers', 'ray'}"
    code = f"import sys, trainer.main_reward; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
