"""The settings that the page for TRL's users names do what TRL's do there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import load_config
from rlsys.config.introspect import value_at

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ROWS = [
    {"algorithm.adv_estimator": "grpo", f"{R}.n": 8, "algorithm.norm_adv_by_std_in_grpo": False},
    {"data.train_batch_size": 64, f"{A}.ppo_mini_batch_size": 32, f"{A}.ppo_micro_batch_size_per_gpu": 4},
    {"data.max_response_length": 64, "data.max_prompt_length": 32},
    {f"{A}.optim.lr": 2e-6, f"{A}.optim.lr_warmup_steps_ratio": 0.1, f"{A}.optim.lr_scheduler_type": "cosine"},
    {f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 0.04},
    {f"{A}.clip_ratio_low": 0.1, f"{A}.clip_ratio_high": 0.28},
    {f"{A}.loss_agg_mode": "seq-mean-token-sum-norm"},
    {f"{A}.policy_loss.loss_mode": "gspo", f"{A}.ppo_epochs": 2},
    {f"{A}.grad_clip": 0.5, f"{A}.optim.weight_decay": 0.1},
    {f"{R}.temperature": 0.7, f"{R}.top_p": 0.9, f"{R}.top_k": 20},
    {f"{M}.lora_rank": 16, f"{M}.lora_alpha": 32, f"{M}.enable_gradient_checkpointing": False},
    {"trainer.total_training_steps": 5, "trainer.total_epochs": 2},
    {"trainer.default_local_dir": "out", "trainer.experiment_name": "mine"},
    {"trainer.save_freq": 5, "trainer.test_freq": 4, "trainer.resume_mode": "disable"},
    {f"{R}.name": "vllm_remote", f"{R}.servers.urls": ("http://host:1",)},
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: next(iter(row)))
def test_settings_for_users_of_trl(row: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"max_position_embeddings": 8192}')
    Path("rows.jsonl").write_text("{}\n")
    shown = {key: f"[{','.join(value)}]" if isinstance(value, tuple) else value for key, value in row.items()}
    argv = [f"{M}.path=model", "data.train_files=rows.jsonl", "data.val_files=rows.jsonl"]
    cfg = load_config([*argv, *(f"{key}={value}" for key, value in shown.items())])
    assert {key: value_at(cfg, key) for key in row} == row
    page = (Path(__file__).resolve().parents[3] / "docs/coming_from_trl.md").read_text()
    assert all(key.rpartition(".")[2] in page for key in row)
