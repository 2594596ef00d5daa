"""AReaL's configuration files are read as they stand, and its words on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import PPOConfig, load_config
from rlsys.config.arguments import parse_arguments
from rlsys.config.introspect import value_at
from rlsys.config.load import load
from rlsys.utils.errors import ConfigError

GRPO = """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 3
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: experiments, name_resolve: {type: nfs}}
scheduler: {type: null}
rollout:
  backend: "sglang:d4p1t1"
  experiment_name: ${experiment_name}
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 1
  scheduling_spec: ${actor.scheduling_spec}
  tokenizer_path: ${tokenizer_path}
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 0.9}
actor:
  backend: "fsdp:d4p1t1"
  path: model
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: false
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240, packing_algorithm: ffd}
  optimizer: {type: adam, lr: 1.70e-5, weight_decay: 0.017, beta1: 0.9, beta2: 0.999, eps: 1e-8,
              lr_scheduler_type: constant, gradient_clipping: 0.5, warmup_steps_proportion: 0.001}
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 4
  recompute_logprob: true
  use_decoupled_loss: true
  rejection_sampling: {metric: ratio, upper: 5.0}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  weight_update_mode: xccl
  max_new_tokens: ${gconfig.max_new_tokens}
  scheduling_spec: [{task_type: worker, gpu: 1}]
ref: {backend: "${actor.backend}", path: "${actor.path}", dtype: "${actor.dtype}", optimizer: null}
sglang: {model_path: "${actor.path}", dtype: "${actor.dtype}", mem_fraction_static: 0.8, attention_backend: fa3}
vllm: {model: "${actor.path}", gpu_memory_utilization: 0.9}
train_dataset: {batch_size: 256, shuffle: true, num_workers: 4, path: rows.jsonl, type: rl, max_length: 700}
valid_dataset: {batch_size: 64, path: rows.jsonl, type: rl}
saver: {experiment_name: "${experiment_name}", freq_epochs: 1, freq_steps: null, freq_secs: null}
evaluator: {freq_epochs: null, freq_steps: 20, freq_secs: null}
recover: {mode: disabled, freq_secs: 3600}
stats_logger: {wandb: {mode: disabled}}
perf_tracer: {enabled: false}
"""
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "grpo.yaml").write_text(GRPO)
    return tmp_path


def test_a_grpo_file_is_read_as_it_stands() -> None:
    cfg = load_config(["--config-name=./grpo.yaml"])
    policy, rollout, trainer = cfg.actor_rollout_ref, cfg.actor_rollout_ref.rollout, cfg.trainer
    assert (trainer.n_gpus_per_node, trainer.rollout_workers, trainer.max_staleness) == (4, 4, 1)
    assert (rollout.name, rollout.n, rollout.temperature, rollout.gpu_memory_utilization) == ("sglang", 4, 0.9, 0.8)
    assert rollout.engine_kwargs.sglang == {"attention_backend": "fa3"}
    assert (policy.model.path, policy.model.tokenizer_path, policy.model.enable_gradient_checkpointing) == (
        *("model", "model"),
        False,
    )
    actor = policy.actor
    assert (actor.optim.lr, actor.optim.weight_decay, actor.grad_clip, actor.clip_ratio_high) == (
        1.7e-5,
        0.017,
        0.5,
        0.4,
    )
    assert (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_mini_batch_size) == (True, 10240, 64)
    assert (actor.fsdp_config.dtype, actor.megatron.dtype) == ("bfloat16", "bfloat16")
    correction = cfg.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold, correction.bypass_mode) == (
        "token",
        "0_5.0",
        False,
    )
    assert (cfg.data.train_batch_size, cfg.data.max_prompt_length, cfg.data.max_response_length) == (256, 700, 1024)
    assert (cfg.data.train_files, cfg.data.val_files, cfg.data.seed) == (("rows.jsonl",), ("rows.jsonl",), 3)
    assert (trainer.save_freq, trainer.test_freq, trainer.resume_mode) == ("after_each_epoch", 20, "disable")
    assert trainer.default_local_dir == "experiments/gsm8k-grpo/trial0"
    assert (cfg.algorithm.adv_estimator, cfg.use_critic) == ("reinforce_plus_plus", False)


def test_what_has_no_meaning_here_is_noted() -> None:
    notes = "\n".join(load(parse_arguments(["--config-name=./grpo.yaml"]), PPOConfig).notes)
    for key in (
        "scheduler",
        "perf_tracer",
        "rollout.scheduling_spec",
        "stats_logger",
        "sglang.model_path",
        "ref.backend",
    ):
        assert key in notes


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("actor.optimizer.beta2=0.95", f"{ACTOR}.optim.betas"),
        ("actor_rollout_ref.rollout.agent.turn_discount=0.5", "discount it in the workflow"),
        ("critic.optimizer.beta2=0.95", "critic.optim.betas"),
        ("actor.rejection_sampling.metric=kl", "only the ratio"),
        ("ref.path=other", "before training"),
        ("actor.ppo_n_minibatches=3", "256 does not divide evenly by 3"),
        ("gconfig.min_new_tokens=5", "any token"),
    ],
)
def test_what_would_change_results_is_refused(argument: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(["--config-name=./grpo.yaml", argument])


def test_group_normalized_rewards_alone_are_grpo() -> None:
    argv = ["--config-name=./grpo.yaml", "algorithm.adv_norm={mean_level: null, std_level: null}"]
    algorithm = load_config([*argv, "algorithm.reward_norm.std_level=null"]).algorithm
    assert (algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo) == ("grpo", False)


# The settings of GRPOConfig, PPOActorConfig, RolloutConfig, SGLangConfig and DatasetConfig, one by one.
NAMES = {
    "actor.lr=2e-6": ("actor_rollout_ref.actor.optim.lr", 2e-6),
    "actor.weight_decay=0.1": ("actor_rollout_ref.actor.optim.weight_decay", 0.1),
    "actor.max_grad_norm=0.5": ("actor_rollout_ref.actor.grad_clip", 0.5),
    "actor.m2_threshold=0.04": ("algorithm.rollout_correction.rollout_rs", "token_m2"),
    "rollout.n_generations=8": ("actor_rollout_ref.rollout.n", 8),
    "rollout.temperature=0.5": ("actor_rollout_ref.rollout.temperature", 0.5),
    "rollout.max_tokens=64": ("data.max_response_length", 64),
    "rollout.batch_size=32": ("data.train_batch_size", 32),
    "rollout.max_head_offpolicyness=3": ("trainer.max_staleness", 3),
    "sglang.tp_size=2": ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2),
    "sglang.attention_backend=triton": (
        "actor_rollout_ref.rollout.engine_kwargs.sglang",
        {"attention_backend": "triton"},
    ),
    "sglang.trust_remote_code=true": ("actor_rollout_ref.model.trust_remote_code", True),
    "sglang.max_total_tokens=9": ("actor_rollout_ref.rollout.engine_kwargs.sglang", {"max_total_tokens": 9}),
    "train_dataset.path=rows.jsonl": ("data.train_files", ("rows.jsonl",)),
    "train_dataset.batch_size=32": ("data.train_batch_size", 32),
    "train_dataset.shuffle=false": ("data.shuffle", False),
    "eval_dataset.path=rows.jsonl": ("data.val_files", ("rows.jsonl",)),
    "eval_dataset.batch_size=3": ("data.val_batch_size", 3),
    "gconfig.stop_token_ids=[7]": ("actor_rollout_ref.rollout.eos", (7,)),
    "gconfig.ignore_eos=true": ("actor_rollout_ref.rollout.ignore_eos", True),
}


@pytest.mark.parametrize("argument", NAMES)
def test_each_name_of_areal_sets_its_key(argument: str) -> None:
    job = ["actor.path=model", "data.train_files=rows.jsonl", "trainer.rollout_workers=2", "trainer.n_gpus_per_node=2"]
    engine = "actor_rollout_ref.rollout.name=sglang"
    more = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=32", engine]
    path, value = NAMES[argument]
    group = [] if path.endswith("rollout.n") else ["actor_rollout_ref.rollout.n=8"]
    assert value_at(load_config([*job, *more, *group, argument]), path) == value


@pytest.mark.parametrize(("arguments", "versions"), [([], 1), (["rollout.max_head_offpolicyness=4"], 4)])
def test_asynchronous_training_is_one_step_off_or_as_many_as_are_set(arguments: list[str], versions: int) -> None:
    for argv in (["async_training=true", *arguments], [*arguments, "async_training=true"]):
        cfg = load_config(["actor.path=model", "data.train_files=rows.jsonl", "trainer.rollout_workers=1", *argv])
        assert cfg.trainer.max_staleness == versions
