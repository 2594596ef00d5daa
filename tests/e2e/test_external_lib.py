"""Code of `actor_rollout_ref.model.external_lib`: an engine, a loss and an estimator train like built-in ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy
from tests.timing import scaled_s
from trainer.main_ppo import main

ENGINE = """
from rlsys.config.engines import RolloutBackend, register_rollout_backend
from rlsys.data.rl_sampler import AbstractCurriculumSampler
from rlsys.rollout.hf.engine import HFRollout
from workers.rollout import RolloutWorker


class ToyRollout(HFRollout):
    pass


class ToyRolloutWorker(RolloutWorker):
    def build_engine(self, path, context):
        return ToyRollout.from_path(path, self.cfg, context)


class Backwards(AbstractCurriculumSampler):
    updates = []

    def __init__(self, data_source, data_config):
        self.num_rows = len(data_source)

    def __len__(self):
        return self.num_rows

    def __iter__(self):
        return iter(reversed(range(self.num_rows)))

    def update(self, batch):
        rows = {info["index"] - self.num_rows for info in batch.non_tensor_batch["extra_info"]}
        self.updates.append((sorted(rows), "advantages" in batch.batch.keys()))


register_rollout_backend(RolloutBackend("toy", "toy_engine:ToyRolloutWorker"))
"""
WRITTEN_FOR_VERL = """
import torch
from rlsys.algorithms.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_policy_loss("verl_loss")
def compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
                        rollout_is_weights=None):
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.clamp(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/verl_ratio": ratio.mean().item()}


@register_adv_est("verl_mean")
def compute_advantage(token_level_rewards, response_mask, index=None, config=None, **kwargs):
    scores = token_level_rewards.sum(dim=-1)
    means = {uid: scores[[i for i, other in enumerate(index) if other == uid]].mean() for uid in set(index)}
    advantages = torch.stack([scores[i] - means[uid] for i, uid in enumerate(index)]).unsqueeze(-1) * response_mask
    return advantages, advantages
"""
OWN = """
import json

import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = [json.loads(line) for file in data_files for line in open(file)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = dict(self.rows[item])
        return {"raw_prompt": [{"role": "user", "content": row.pop("prompt")}], **row}


class LengthManager:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **reward_kwargs):
        self.tokenizer = tokenizer

    def __call__(self, data, return_dict=False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][prompt_length:].sum())
            reward_tensor[i, length - 1] = length
        return {"reward_tensor": reward_tensor, "reward_extra_info": {}} if return_dict else reward_tensor
"""
SCRIPT = """
import sys

from rlsys.config import load_config
from rlsys.data.collate import collate_prompts
from trainer.build import build_trainer
from trainer.ppo import RayPPOTrainer


class InOrder:
    def __init__(self, dataset, size):
        self.dataset, self.size, self.position = dataset, size, 0

    def next(self):
        rows = [self.dataset[self.position + i] for i in range(self.size)]
        self.position += self.size
        return collate_prompts(rows, prompt_length=16, pad_token_id=0, epoch=0)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Mine(RayPPOTrainer):
    def __init__(self, *args, train_dataset, **kwargs):
        super().__init__(*args, train_dataset=train_dataset, train_sampler=InOrder(train_dataset, 8), **kwargs)

    def step(self, batch):
        trained = super().step(batch)
        places = sorted({info["index"] for info in trained.non_tensor_batch["extra_info"]})
        print(f"trained on prompts {places[0]} to {places[-1]}", flush=True)
        return trained


if __name__ == "__main__":
    trainer = build_trainer(load_config(sys.argv[1:]), trainer_cls=Mine)
    trainer.init_workers()
    trainer.fit()
    trainer.close()
"""
ENGINE_KEY, LIBRARY_KEY = "actor_rollout_ref.rollout.name", "actor_rollout_ref.model.external_lib"


def test_a_registered_engine_trains_a_step_in_a_samplers_order(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    engine = (f"{ENGINE_KEY}=toy", f"{LIBRARY_KEY}=toy_engine")
    sampler = ("data.sampler.class_path=pkg://toy_engine", "data.sampler.class_name=Backwards")
    assert main(toy.overrides(out, "trainer.backend=local", "trainer.total_training_steps=1", *engine, *sampler)) == 0
    assert sys.modules["toy_engine"].Backwards.updates == [(list(range(-8, 0)), True)]
    line = json.loads((out / "metrics.jsonl").read_text())
    assert line["rollout/answered"] > 0
    assert line["training/rollout_probs_diff_max"] < 1e-5


def test_everything_written_for_verl_and_an_engine_train_a_step_on_ray(toy: Toy, tmp_path: Path) -> None:
    """Loss, estimator, reward manager, dataset, sampler and trainer class; workers import the library from its file."""
    for name, text in (("toy_engine", ENGINE), ("library", f"import toy_engine\n{WRITTEN_FOR_VERL}"), ("own", OWN)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = toy.overrides(
        tmp_path / "out",
        "trainer.total_training_steps=1",
        "ray_kwargs.ray_init.num_cpus=2",
        f"{ENGINE_KEY}=toy",
        f"{LIBRARY_KEY}={tmp_path}/library.py",
        "algorithm.adv_estimator=verl_mean",
        "actor_rollout_ref.actor.policy_loss.loss_mode=verl_loss",
        *("reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={tmp_path}/own.py"),
        *("reward.reward_manager.module.name=LengthManager", f"data.custom_cls.path={tmp_path}/own.py"),
        "data.custom_cls.name=Rows",
    )
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), *argv],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{tmp_path}"},
        timeout=scaled_s(120),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "trained on prompts 0 to 7" in ended.stdout
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert line["actor/verl_ratio"] == pytest.approx(1.0, abs=0.1)
    assert line["critic/score/mean"] == pytest.approx(line["response_length/mean"])


def test_an_estimator_and_a_loss_written_for_verl_train_like_dr_grpo(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "written_for_verl.py").write_text(WRITTEN_FOR_VERL)
    common = ("trainer.backend=local", "trainer.total_training_steps=2")
    ours = ("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false")
    theirs = (
        f"{LIBRARY_KEY}={tmp_path}/written_for_verl.py",
        "algorithm.adv_estimator=verl_mean",
        "actor_rollout_ref.actor.policy_loss.loss_mode=verl_loss",
    )
    lines = []
    for name, argv in (("ours", ours), ("theirs", theirs)):
        assert main(toy.overrides(tmp_path / name, *common, *argv)) == 0
        lines.append([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
    for expected, line in zip(*lines, strict=True):
        for key in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max", "critic/score/mean"):
            assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
        assert line["actor/verl_ratio"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", ["broken.py", "broken"])
def test_a_library_that_cannot_be_imported_names_its_key(
    toy: Toy, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    library = str(tmp_path / name) if name.endswith(".py") else name
    assert main(toy.overrides(tmp_path / "out", "trainer.backend=local", f"{LIBRARY_KEY}={library}")) != 0
    error = capsys.readouterr().err
    assert f"{LIBRARY_KEY}={library}" in error
    assert "RuntimeError: no licence" in error
