"""A job that names no model gets the start model and its rows, and only where it names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import load_config
from rlsys.data.start_assets import StartAssets
from trainer import start_model
from trainer.start_model import with_start_assets

ASSETS = StartAssets(Path("/start/model"), Path("/start/train.jsonl"), Path("/start/val.jsonl"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def ensure(warm_up: object) -> StartAssets:
        calls.append(warm_up)
        return ASSETS

    monkeypatch.setattr(start_model, "ensure_start_assets", ensure)
    return calls


def test_a_job_without_a_model_trains_the_start_model_on_its_rows(asked: list[object]) -> None:
    cfg = with_start_assets(load_config(["--config-name=quickstart"]))
    assert cfg.actor_rollout_ref.model.path == cfg.critic.model.path == "/start/model"
    assert (cfg.data.train_files, cfg.data.val_files) == (("/start/train.jsonl",), ("/start/val.jsonl",))
    assert asked == [start_model.warm_up]


def test_rows_that_the_job_names_stay(asked: list[object], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    cfg = with_start_assets(load_config(["--config-name=quickstart", f"data.train_files={tmp_path}/rows.jsonl"]))
    assert cfg.data.train_files == (f"{tmp_path}/rows.jsonl",)
    assert cfg.data.val_files != ("/start/val.jsonl",)


def test_a_job_with_a_model_is_left_alone(asked: list[object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    cfg = load_config(["--config-name=quickstart", f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=null"])
    assert with_start_assets(cfg) is cfg
    assert asked == []
