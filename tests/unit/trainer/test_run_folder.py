"""The folder of a run: what was run, what has changed since, and one job at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.config import EvalConfig, PPOConfig, load_config
from rlsys.utils.errors import ConfigError
from trainer.checkpoint import CheckpointStore, TrainerState, save_state
from trainer.run_folder import locked, run_folder
from trainer.summary import summary_lines

HOLD_LOCK = """
import sys
from pathlib import Path
from trainer.run_folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def config_of(root: Path, *overrides: str) -> PPOConfig:
    return load_config(
        [
            "--config-name=quickstart",
            f"trainer.default_local_dir={root}/out",
            f"reward.custom_reward_function.path={grader(root)}",
            *overrides,
        ]
    )


def grader(root: Path, body: str = "return 1.0") -> Path:
    path = root / "grader.py"
    if not path.exists() or body != "return 1.0":
        path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    return path


def started(config: PPOConfig) -> Path:
    with run_folder(config) as begin:
        begin()
        return Path(config.trainer.default_local_dir)


def saved(root: Path, step: int) -> None:
    with CheckpointStore(root, keep={}).writing(step) as folder:
        save_state(folder, TrainerState(step))


def test_a_run_writes_down_what_was_run_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "rosebud-1234567")
    argv = ["actor_rollout_ref.actor.optim.lr=1e-4", "trainer.experiment_name=rosebud-1234567"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "trainer.main_ppo", *argv])
    config = config_of(tmp_path, "actor_rollout_ref.actor.optim.lr=1e-4")
    root = started(config)
    assert load_config([f"--config-name={root / 'config.yaml'}"]) == config
    (start,) = [json.loads(line) for line in (root / "starts.jsonl").read_text().splitlines()]
    assert start["command"].startswith("python -m trainer.main_ppo actor_rollout_ref.actor.optim.lr=1e-4")
    assert (start["pid"], start["folder"]) == (os.getpid(), os.getcwd())
    assert start["versions"]["rlsys"]
    assert start["versions"]["torch"]
    assert list(start["code"]) == ["code of reward.custom_reward_function.path"]
    texts = [(root / name).read_text() for name in ("config.yaml", "starts.jsonl", "train.log")]
    assert not any("rosebud" in text for text in texts)
    assert "started: python -m trainer.main_ppo" in texts[2]


def test_a_trainer_in_a_job_writes_no_second_record(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with run_folder(config) as begin:
        started(config)
        begin()
    root = started(config)
    assert len((root / "starts.jsonl").read_text().splitlines()) == 2


def test_a_start_that_fails_leaves_the_record_of_the_run_before_it(tmp_path: Path) -> None:
    root = started(config_of(tmp_path))
    before = [(root / name).read_bytes() for name in ("config.yaml", "starts.jsonl")]
    with pytest.raises(ZeroDivisionError), run_folder(config_of(tmp_path, "actor_rollout_ref.actor.optim.lr=0.5")):
        raise ZeroDivisionError
    assert [(root / name).read_bytes() for name in ("config.yaml", "starts.jsonl")] == before
    assert (root / "train.log").read_text().count("started: ") == 2


def test_an_evaluation_does_not_write_into_the_folder_of_a_training_run(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    named = ["actor_rollout_ref.model.path=org/model", f"data.val_files={rows}"]
    argv = [*named, f"trainer.default_local_dir={tmp_path}/out"]
    config = load_config(argv, EvalConfig)
    with run_folder(config) as begin:
        begin()
    assert load_config([f"--config-name={tmp_path}/out/config.yaml"], EvalConfig) == config
    (tmp_path / "out" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="has a training run: set another one"), run_folder(config):
        pass


def test_a_resumed_run_reports_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(started(config_of(tmp_path)), 3)
    caplog.set_level("INFO")
    root = started(config_of(tmp_path, "actor_rollout_ref.actor.optim.lr=0.001", "trainer.resume_mode=auto"))
    (message,) = [m for m in caplog.messages if m.startswith("changed since the run that is resumed")]
    assert "actor_rollout_ref.actor.optim.lr 0.0003 -> 0.001" in message
    assert message.count("\n") == 1
    assert len((root / "starts.jsonl").read_text().splitlines()) == 2
    caplog.clear()
    started(config_of(tmp_path, "actor_rollout_ref.actor.optim.lr=0.001"))
    assert not [m for m in caplog.messages if m.startswith("changed")]


def test_what_only_follows_a_changed_setting_is_not_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(started(config_of(tmp_path)), 3)
    caplog.set_level("INFO")
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/out/global_step_3"]
    moved = f"trainer.default_local_dir={tmp_path}/other"
    started(config_of(tmp_path, *resumed, moved))
    (message,) = [m for m in caplog.messages if m.startswith("changed since the run that is resumed")]
    assert message.count("\n") == 1, message
    assert f"trainer.default_local_dir {tmp_path}/out -> {tmp_path}/other" in message
    caplog.clear()
    started(config_of(tmp_path, *resumed, moved, "trainer.rollout_data_dir=null"))
    (message,) = [m for m in caplog.messages if m.startswith("changed since the run that is resumed")]
    assert f"trainer.rollout_data_dir {tmp_path}/out/rollouts -> null" in message


def test_a_long_text_that_names_a_python_file_is_a_setting_like_others(tmp_path: Path) -> None:
    """Names as long as that of a file before its `.py` cannot be looked up."""
    template = "{{ messages[0].content }} " + "Write the program into the file " * 9 + "answer.py first."
    config = config_of(tmp_path, f"actor_rollout_ref.model.custom_chat_template={json.dumps(template)}")
    (row,) = map(json.loads, (started(config) / "starts.jsonl").read_text().splitlines())
    assert list(row["code"]) == ["code of reward.custom_reward_function.path"]


@pytest.mark.parametrize("changed", ["the algorithm", "the reward function", "the workflow"])
def test_a_checkpoint_of_another_experiment_is_only_continued_if_confirmed(tmp_path: Path, changed: str) -> None:
    workflow = tmp_path / "agent.py"
    workflow.write_text("def run(row, session): ...")
    overrides = [f"actor_rollout_ref.rollout.workflow={workflow}:run"] if changed == "the workflow" else []
    saved(started(config_of(tmp_path, *overrides)), 3)
    line = "code of reward.custom_reward_function.path"
    if changed == "the algorithm":
        overrides, line = ["algorithm.adv_estimator=rloo"], "algorithm.adv_estimator grpo -> rloo"
    elif changed == "the workflow":
        workflow.write_text("def run(row, session): return 1.0")
        line = "code of actor_rollout_ref.rollout.workflow"
    else:
        grader(tmp_path, "return 0.5")
    with pytest.raises(ConfigError, match="global_step_3 belongs to another experiment") as raised:
        started(config_of(tmp_path, *overrides))
    assert line in str(raised.value)
    assert "trainer.resume_changed=true" in str(raised.value)
    started(config_of(tmp_path, *overrides, "trainer.resume_mode=disable"))
    started(config_of(tmp_path, *overrides, "trainer.resume_changed=true"))


def test_a_second_job_in_the_folder_is_refused_until_the_first_one_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "locked\n"
    with pytest.raises(ConfigError, match=rf"another job writes there \(pid {first.pid} on "), locked(path):
        pass
    first.kill()
    first.wait()
    with locked(path):
        assert path.read_text().startswith(f"pid {os.getpid()} on ")


def test_a_relative_folder_in_the_package_of_a_ray_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    package.mkdir(parents=True)
    config = load_config(["--config-name=quickstart", "trainer.default_local_dir=out"])
    monkeypatch.chdir(package)
    with pytest.raises(ConfigError, match="which Ray deletes after the job; set an absolute path"):
        started(config)
    monkeypatch.chdir(tmp_path)
    started(config)
    assert (tmp_path / "out").is_dir()


def test_the_summary_has_first_last_and_best_values_and_what_to_do_next(tmp_path: Path) -> None:
    run = config_of(tmp_path).trainer
    root = tmp_path / "out"
    root.mkdir()
    assert summary_lines(run, finished=False) == [
        "  next        the same command continues at step 1: nothing was saved yet"
    ]
    assert summary_lines(run, finished=False, resumes=False) == []
    rewards = [0.25, 0.75, 0.5]
    records = [{"step": step, "critic/score/mean": reward} for step, reward in enumerate(rewards, 1)]
    records[0]["val-core/sums/reward/mean@1"] = 0.125
    records[2]["val-core/sums/reward/mean@1"] = 0.375
    (root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    saved(root, 2)
    lines = summary_lines(run, finished=False)
    assert "  reward      0.250 -> 0.500 in steps 1 to 3, best 0.750 at step 2" in lines
    assert "  validation of sums/reward/mean@1 0.125 -> 0.375 in steps 1 to 3" in lines
    assert f"  checkpoint  {root}/global_step_2" in lines
    (root / "metrics.jsonl").write_text(json.dumps(records[0]) + "\n")
    assert "  reward      0.250 at step 1" in summary_lines(run, finished=False)
    assert lines[-1] == "  next        the same command continues from step 2"
    (root / "mlflow.db").touch()
    mlflow = f"  next        mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db"
    assert mlflow in summary_lines(run, finished=True)
    (root / "global_step_2" / "actor").mkdir()
    assert f"merge --local_dir {root}/global_step_2/actor" in summary_lines(run, finished=True)[-1]
    (root / "global_step_2/actor/tensors.json").write_text('{"model.q_proj.lora_A.default.weight": {}}')
    saves = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    assert saves in summary_lines(run, finished=True)[-1], "it can be copied to the command line"
    for whole in (root / "global_step_2/huggingface", root / "global_step_2/actor/huggingface"):
        whole.mkdir()
        (whole / "model.safetensors").touch()
        assert summary_lines(run, finished=True)[-1] == f"  model       {whole}", "merge refuses adapters"
