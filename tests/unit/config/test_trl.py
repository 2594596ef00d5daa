"""The settings that the page for TRL's users names do what TRL's do there."""

import re
from pathlib import Path

import pytest

from rlsys.config import DPOConfig, PPOConfig, load_config
from rlsys.config.introspect import leaves, value_at

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
    {f"{A}.loss_agg_mode": "token-mean", "trainer.logger": ("console", "tensorboard")},
    {"data.prompt_key": "input", "data.answer_key": "label", f"{A}.clip_ratio_c": 4.0, f"{A}.entropy_coeff": 0.01},
    {f"{A}.optim.betas": (0.9, 0.95), f"{A}.optim.min_lr_ratio": 0.1, f"{A}.ppo_max_token_len_per_gpu": 16192},
    {"algorithm.adv_estimator": "gae", "critic.optim.lr": 9e-6, "critic.cliprange_value": 0.2, "algorithm.lam": 0.95},
    {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.use_kl_in_reward": True},
    {"algorithm.adv_estimator": "rloo", f"{R}.n": 4, "algorithm.kl_ctrl.kl_coef": 0.01},
    {f"{A}.use_kl_loss": True, f"{A}.kl_loss_type": "low_var_kl"},
    {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc", f"{R}.n": 4},
    {"trainer.rollout_workers": 4, "trainer.max_staleness": 1},
    {f"{A}.ulysses_sequence_parallel_size": 1},
    {f"{A}.strategy": "megatron", f"{A}.megatron.tensor_model_parallel_size": 1},
    {f"{A}.fsdp_config.optimizer_offload": True, f"{R}.gpu_memory_utilization": 0.6},
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: next(iter(row)))
def test_settings_for_users_of_trl(row: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"max_position_embeddings": 8192}')
    Path("rows.jsonl").write_text("{}\n")
    shown = {key: f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value for key, value in row.items()}
    argv = [f"{M}.path=model", "data.train_files=rows.jsonl", "data.val_files=rows.jsonl"]
    cfg = load_config([*argv, *(f"{key}={value}" for key, value in shown.items())])
    assert {key: value_at(cfg, key) for key in row} == row
    page = (Path(__file__).resolve().parents[3] / "docs/coming_from_trl.md").read_text()
    assert all(key.rpartition(".")[2] in page for key in row)


def test_every_key_on_the_page_exists() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/coming_from_trl.md").read_text()
    known = {**leaves(PPOConfig), **leaves(DPOConfig)}
    named = re.findall(r"`((?:actor_rollout_ref|algorithm|data|critic|reward|trainer|dpo)\.[a-z_.]*[a-z])[=`]", page)
    keys = [key for key in named if not key.startswith(("trainer.main_", "trainer.step", "trainer.next"))]
    assert len(keys) > 60
    assert [key for key in keys if not any(f"{name}.".startswith(f"{key}.") for name in known)] == []
