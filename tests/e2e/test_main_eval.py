"""The evaluation job: metrics on the console and in a file, and a clear error."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from rlsys.data.start_assets import START_MODEL
from tests.e2e.conftest import Toy
from tests.hub import Hub
from tests.timing import scaled_s
from trainer.main_eval import main

ROOT = Path(__file__).resolve().parents[2]

README = b"""---
configs:
- config_name: default
  data_files:
  - {split: test, path: "test.*"}
---"""


def evaluation(toy: Toy, out: Path) -> list[str]:
    """Arguments of an evaluation of a few seconds."""
    return [
        f"reward.custom_reward_function.path={toy.grader}",
        "reward.num_workers=1",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "trainer.backend=local",
        f"trainer.default_local_dir={out}",
    ]


def test_an_evaluation_writes_its_metrics(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    argv = [
        f"actor_rollout_ref.model.path={toy.model}",
        f"data.val_files={toy.val}",
        *evaluation(toy, out),
        f"data.output_path={tmp_path / 'answers.parquet'}",
        "data.n_samples=2",
        "rollout.temperature=1.0",
    ]
    assert main(argv) == 0
    answers, prompts = (
        read_table(tmp_path / "answers.parquet").to_pylist(),
        [json.loads(line) for line in toy.val.read_text().splitlines()],
    )
    assert [row["prompt"][-1]["content"] for row in answers] == [row["prompt"] for row in prompts]
    assert {(len(row["responses"]), len(row["scores"])) for row in answers} == {(2, 2)}
    assert answers[0]["reward_model"]["ground_truth"] == prompts[0]["reward_model"]["ground_truth"]
    metrics = json.loads((out / "evaluation.json").read_text())
    printed = capsys.readouterr().out
    core = [name for name in metrics if name.startswith("val-core/")]
    assert core
    assert all(f"{name} = {metrics[name]:.4f}" in printed for name in core)
    assert "rlsys: done in" in printed
    assert str(out / "evaluation.json") in printed
    assert all((out / name).exists() for name in ("config.yaml", "starts.jsonl", "train.log"))
    with pytest.raises(SystemExit, match="2"):
        main([*argv, "trainer.device=cuda"])


def test_answers_end_at_the_tokenizers_end_too(tmp_path: Path) -> None:
    """What SFT teaches to end an answer with ends it in evaluations, whatever generation_config.json has."""
    shutil.copytree(START_MODEL, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / "model" / name).read_text()) | {"eos_token_id": 5}
        (tmp_path / "model" / name).write_text(json.dumps(settings))
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}+4=", "ground_truth": ""}) for n in range(8))
    )
    (tmp_path / "grader.py").write_text("def compute_score(**_): return 1.0")
    rows = tmp_path / "rows.jsonl"
    answers = []
    for model in (START_MODEL, tmp_path / "model"):
        mine = Toy(model, rows, rows, tmp_path / "grader.py", model)
        given = [f"actor_rollout_ref.model.path={model}", f"data.val_files={rows}"]
        given.append(f"data.output_path={tmp_path / 'answers.parquet'}")
        assert main([*given, *evaluation(mine, tmp_path / "out"), "data.max_response_length=12"]) == 0
        answers.append([row["responses"] for row in read_table(tmp_path / "answers.parquet").to_pylist()])
    assert answers[0] == answers[1]


def test_answers_are_kept_where_columns_hold_several_types(toy: Toy, tmp_path: Path) -> None:
    truths = (
        {"reward_model": {"ground_truth": "2"}},
        {"reward_model": {"ground_truth": [4, {}]}, "extra_info": {"a": 1}},
    )
    rows = [{"prompt": "1+1=", "data_source": "mine", **truth} for truth in truths]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = [
        f"actor_rollout_ref.model.path={toy.model}",
        f"data.val_files={tmp_path / 'rows.jsonl'}",
        *evaluation(toy, tmp_path / "out"),
        f"trainer.output_path={tmp_path / 'answers.parquet'}",
    ]
    assert main(argv) == 0
    answers = read_table(tmp_path / "answers.parquet").to_pylist()
    assert [json.loads(row["reward_model"])["ground_truth"] for row in answers] == ["2", [4, {}]]
    assert [json.loads(row["extra_info"]) for row in answers] == [None, {"a": 1}]
    assert [len(row["responses"]) for row in answers] == [1, 1]


def test_an_evaluation_downloads_its_model_and_rows(toy: Toy, tmp_path: Path) -> None:
    files = {file.name: file.read_bytes() for file in toy.model.iterdir()}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    argv = [
        "actor_rollout_ref.model.path=org/toy@v1",
        "data.val_files=org/rows:test",
        *evaluation(toy, tmp_path / "out"),
    ]
    rows = {"README.md": README, f"test{toy.val.suffix}": toy.val.read_bytes()}
    with Hub({"org/toy": files, "org/rows": rows}).served() as hub:
        environment = {**kept, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}

        def run(*more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "trainer.main_eval", *argv, *more]
            limit_s = scaled_s(120)
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False, cwd=tmp_path
            )

        ended = run()
        assert ended.returncode == 0, ended.stderr
        assert "val-core/" in ended.stdout
        assert "\neval 1/1" in ended.stdout
        assert "%|" not in ended.stdout + ended.stderr
        assert hub.downloads["model.safetensors"] == 1
        refused = run("actor_rollout_ref.model.path=org/none")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "org/none is not a folder here, and cannot be downloaded" in refused.stderr
