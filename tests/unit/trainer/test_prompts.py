"""What is checked of rows before a run starts."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from rlsys.config import DPOConfig, PPOConfig, SFTConfig, load_config
from rlsys.utils.errors import ConfigError, DataError
from tests.start_tokenizer import build_tokenizer
from trainer.build import prepare
from trainer.job import checked_config
from trainer.prompts import load_prompts

ROW: dict[str, Any] = {"prompt": "1+1=", "data_source": "rlsys/arithmetic", "ground_truth": "2"}
GOOD = {"question": "1+1=", "answer": "2"}


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


def printed(capsys: pytest.CaptureFixture[str], schema: type, *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        checked_config(["--dry-run", *argv], schema)
    output = capsys.readouterr()
    return int(str(stopped.value.code)), output.out, output.err


def exits(capsys: pytest.CaptureFixture[str], schema: type, *argv: str) -> tuple[int, str]:
    code, _, error = printed(capsys, schema, *argv)
    return code, error


def test_a_dry_run_reads_the_first_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    build_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "grade.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ..."
    )
    rows = written(tmp_path / "own.jsonl", *[GOOD] * 30)
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
        some = written(tmp_path / f"{name}.jsonl", GOOD, row, *[GOOD] * 7)
        code, error = exits(capsys, PPOConfig, *qa, f"data.train_files={some}")
        assert (code, problem in error) == (2, True), error
        assert exits(capsys, PPOConfig, *qa, f"data.train_files={some}", "data.bad_rows=skip")[0] == 0
    bad = written(tmp_path / "bad.jsonl", ROW, {**ROW, "prompt": " "}, *[ROW] * 7)
    code, error = exits(capsys, PPOConfig, *ppo, f"data.train_files={bad}")
    assert (code, "bad.jsonl, line 2: column 'prompt' is blank; correct it" in error) == (2, True)
    assert exits(capsys, PPOConfig, *ppo, f"data.train_files={bad}", "data.bad_rows=skip")[0] == 0
    sft = (f"model.path={model}", f"data.train_files={rows}", "data.prompt_key=question", "data.train_batch_size=8")
    code, error = exits(capsys, SFTConfig, *sft)
    assert (code, "column 'response' is missing: set data.response_key=answer" in error) == (2, True)
    assert exits(capsys, SFTConfig, *sft, "data.response_key=answer")[0] == 0


PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
LABELED = {"prompt": "1+1=", "completion": "2", "label": True}


@pytest.mark.parametrize(
    ("schema", "row", "good", "problem"),
    [
        (SFTConfig, {"prompt": "1+1=", "response": "2" * 500}, {"prompt": "1+1=", "response": "2"}, "max_length="),
        (SFTConfig, {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "1+1=", "response": "2"}, "to learn"),
        (DPOConfig, {**PAIR, "rejected": "2"}, PAIR, "columns 'chosen' and 'rejected' are the same"),
        (DPOConfig, LABELED, PAIR, "column 'rejected' is missing: set data.rejected_key=<column>, or another dpo.loss"),
    ],
)
def test_a_dry_run_refuses_first_rows_that_the_run_would_refuse(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    schema: type,
    row: dict[str, Any],
    good: dict[str, Any],
    problem: str,
) -> None:
    build_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    argv = (f"model.path={tmp_path}", "data.train_batch_size=2", "data.max_length=256", "data.truncation=error")
    bad = (*argv, f"data.train_files={written(tmp_path / 'bad.jsonl', row, *[good] * 3)}")
    code, error = exits(capsys, schema, *bad)
    assert (code, problem in error) == (2, True), error
    assert "at most 3 of 4 rows" in printed(capsys, schema, *bad, "data.bad_rows=skip")[1]
    assert exits(capsys, schema, *argv, f"data.train_files={written(tmp_path / 'good.jsonl', *[good] * 3)}")[0] == 0


def test_the_plan_does_not_count_bad_rows_that_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "rows.jsonl", {**ROW, "prompt": " "}, *[ROW] * 6, {"prompt": "1+1="})
    argv = ("--config-name=quickstart", f"data.train_files={file}", "actor_rollout_ref.actor.ppo_mini_batch_size=6")
    argv += (f"trainer.default_local_dir={tmp_path}/out", "data.bad_rows=skip")
    code, plan, error = printed(capsys, PPOConfig, *argv, "data.train_batch_size=6")
    assert (code, f"data       at most 6 of 8 rows of {file}; the first: " in plan) == (0, True), plan + error
    code, error = exits(capsys, PPOConfig, *argv, "data.train_batch_size=7", f"{argv[2][:-1]}7")
    assert (code, "6 usable rows, fewer than a batch of 7" in error) == (2, True), error


ENVIRONMENTS = """
class Scores:
    def reset(self, **row): ...
    def get_reward(self): return 1.0


class Asks:
    def reset(self, **row): ...
"""


def test_rows_that_a_workflow_scores_itself_need_no_data_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "environments.py"
    file.write_text(ENVIRONMENTS)
    rows = written(tmp_path / "rows.jsonl", *[{"prompt": "1+1=", "ground_truth": "2"}] * 8)
    named = written(tmp_path / "named.jsonl", *[{**ROW, "data_source": "mine"}] * 8)
    out = f"trainer.default_local_dir={tmp_path}/out"
    argv = ("--config-name=quickstart", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", out)
    workflow = "actor_rollout_ref.rollout.workflow"
    for path in (rows, named):
        own = (*argv, f"data.train_files={path}")
        code, error = exits(capsys, PPOConfig, *own, f"{workflow}={file}:Scores")
        assert code == 0, error
        cfg = load_config([*own, f"{workflow}={file}:Scores"], PPOConfig)
        assert prepare(cfg).train_rows.data_sources == ("custom" if path == rows else "mine",)
        with pytest.raises(ConfigError, match="no built-in reward function for data_source"):
            prepare(load_config([*own, f"{workflow}={file}:Asks"], PPOConfig))
        code, error = exits(capsys, PPOConfig, *own, f"{workflow}=ToolWorkflow")
        assert (code, "data_source" in error) == (2, True), error


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_the_plan_shows_the_number_of_rows_and_the_first_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ eos_token }}"
    tokenizer.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "grade.py").write_text("def compute_score(data_source, solution_str, **_): ...")
    values = [{"question": f"what is {i} plus {i}?\n{'x' * 200}", "answer": str(2 * i)} for i in range(12)]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(values), path)
    elif kind == "csv":
        write_csv(pa.Table.from_pylist(values), path)
    elif kind == "json":
        path.write_text(json.dumps(values))
    else:
        written(path, *values)
    argv = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.rollout.n=2",
        f"data.train_files={path}",
        "data.prompt_key=question",
        "data.answer_key=answer",
        f"reward.custom_reward_function.path={tmp_path}/grade.py",
    ]
    validation = (f"data.val_files={path}", "data.val_max_samples=3")
    code, plan, error = printed(capsys, PPOConfig, *argv, *validation, "data.train_batch_size=12")
    assert code == 0, error
    data, val = (line.strip() for line in plan.splitlines()[1:3])
    assert data.startswith(f"data       12 rows of {path}; the first: '[user] what is 0 plus 0?\\nxxx")
    assert data.endswith(f"xxx\\n{tokenizer.eos_token}' -> '0'")
    assert val.startswith(f"validation 3 of 12 rows of {path}; ")
    code, error = exits(capsys, PPOConfig, *argv, "data.train_batch_size=13")
    assert (code, "12 usable rows, fewer than a batch of 13: set data.train_batch_size" in error) == (2, True), error
