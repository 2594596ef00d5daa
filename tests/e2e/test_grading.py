"""A run whose answers cannot be graded does not train; one whose answers teach nothing says so."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy
from trainer.main_ppo import main

LOCAL = "trainer.backend=local"
FUNCTION = "reward.custom_reward_function.path"
REWARDS = """
import threading
def broken(data_source, solution_str, ground_truth, extra_info=None): return float(solution_str + "x")
def constant(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.25, "in_main_thread": threading.current_thread() is threading.main_thread()}
def trl(prompts, completions): return [1.0]
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


def test_a_run_without_grades_ends_with_the_first_cause_and_saves_nothing(
    toy: Toy, tmp_path: Path, functions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(toy.overrides(out, LOCAL, f"{FUNCTION}={functions}", "reward.custom_reward_function.name=broken")) == 1
    error = capsys.readouterr().err
    assert "32 of 32 answers could not be graded (0 timed out). First: ValueError: could not convert" in error
    assert "reward.max_failed=0.5" in error
    assert not (out / "latest_checkpointed_iteration.txt").exists()
    assert not list(out.glob("global_step_*"))


def test_a_function_that_cannot_be_called_is_refused_before_the_start(
    toy: Toy, tmp_path: Path, functions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "reward.custom_reward_function.name=trl"
    with pytest.raises(SystemExit) as ended:
        main(toy.overrides(tmp_path / "out", "--dry-run", f"{FUNCTION}={functions}", name))
    assert ended.value.code == 2
    assert "trl(prompts, completions) is called with data_source, solution_str" in capsys.readouterr().err


def test_rows_that_nothing_would_grade_are_refused_before_the_start(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "1 + 1 =", "data_source": "mine", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 32))
    for first in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            main(toy.overrides(tmp_path / "out", LOCAL, f"data.train_files={tmp_path}/rows.jsonl", *first))
        assert ended.value.code == 2
        assert "no built-in reward function for data_source 'mine'" in capsys.readouterr().err
    known = row | {"data_source": "rlsys/arithmetic"}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(r) for r in [known] * 40 + [row]))
    assert main(toy.overrides(tmp_path / "out", LOCAL, f"data.train_files={tmp_path}/rows.jsonl")) == 2
    assert "no built-in reward function for data_source 'mine'" in capsys.readouterr().err


def test_three_steps_of_equal_rewards_are_reported_and_graded_in_this_process(
    toy: Toy, tmp_path: Path, functions: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    rollouts = f"trainer.rollout_data_dir={out}/rollouts"
    argv = (f"{FUNCTION}={functions}", "reward.custom_reward_function.name=constant", "reward.num_workers=0", rollouts)
    assert main(toy.overrides(out, LOCAL, *argv)) == 0
    (warning,) = [r.getMessage() for r in caplog.records if "nothing to learn" in r.getMessage()]
    assert warning.startswith("all rewards were 0.25 for 3 steps: there is nothing to learn")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["critic/score/frac_zero_std"] for line in lines] == [1.0] * 3
    assert all(line["actor/entropy"] > 0 for line in lines)
    assert {json.loads(row)["in_main_thread"] for row in (out / "rollouts/1.jsonl").read_text().splitlines()} == {True}
