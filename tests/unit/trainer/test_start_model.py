"""A job that names no model gets the start model, and one that names no rows those of that model."""

from pathlib import Path

from rlsys.config import load_config
from rlsys.data.start_assets import HELD_OUT_ROWS, START_MODEL, TRAIN_ROWS
from trainer.local_files import with_start_assets


def test_a_job_without_a_model_trains_the_start_model_on_its_rows() -> None:
    cfg = with_start_assets(load_config(["--config-name=quickstart"]))
    assert cfg.actor_rollout_ref.model.path == cfg.critic.model.path == str(START_MODEL)
    assert (cfg.data.train_files, cfg.data.val_files) == ((str(TRAIN_ROWS),), (str(HELD_OUT_ROWS),))


def test_rows_that_the_job_names_stay(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    cfg = with_start_assets(load_config(["--config-name=quickstart", f"data.train_files={tmp_path}/rows.jsonl"]))
    assert cfg.data.train_files == (f"{tmp_path}/rows.jsonl",)
    assert cfg.data.val_files != (str(HELD_OUT_ROWS),)


def test_another_model_trains_on_these_rows_where_the_job_names_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    cfg = with_start_assets(load_config(["--config-name=quickstart", f"actor_rollout_ref.model.path={tmp_path}"]))
    assert (cfg.actor_rollout_ref.model.path, cfg.data.train_files) == (str(tmp_path), (str(TRAIN_ROWS),))
