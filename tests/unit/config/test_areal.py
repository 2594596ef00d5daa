"""AReaL's configuration files are read as they stand, and its words on the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlsys import areal
from rlsys.config import DPOConfig, PPOConfig, RMConfig, SFTConfig, load_config
from rlsys.config.arguments import parse_arguments
from rlsys.config.introspect import value_at
from rlsys.config.load import load
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]
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
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 0.9, frequency_penalty: 0}
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
valid_dataset: {batch_size: 64, path: rows.jsonl, type: rl, shuffle: true}
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
    assert (trainer.default_local_dir, cfg.data.validation_shuffle) == ("experiments/gsm8k-grpo/trial0", True)
    assert (cfg.algorithm.adv_estimator, cfg.use_critic) == ("reinforce_plus_plus", False)


@pytest.mark.parametrize("key", ["actor.c_clip", "c_clip"])
def test_a_dual_clip_that_is_switched_off_does_not_get_the_default(key: str) -> None:
    bounds = [
        load(
            parse_arguments(["--config-name=./grpo.yaml", *more]), PPOConfig
        ).config.actor_rollout_ref.actor.clip_ratio_c
        for more in ([], [f"{key}=4.0"], [f"{key}=null"])
    ]
    assert bounds == [3.0, 4.0, 1e6]


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
        ("actor.optimizer.beta1=0.8", "betas"),
        ("saver.freq_epochs=2", "trainer.save_freq"),
        ("max_turns=3", "set actor_rollout_ref.rollout.workflow=module.Class"),
        ("teacher.path=other", "gradient does not depend on the teacher"),
        ("judge_engine.backend=sglang:d1", "reward.reward_model"),
        ("actor.prox_logp_method=loglinear", "not approximated"),
        ("dynamic_bs=true", "filter_groups"),
        ("actor_rollout_ref.rollout.agent.turn_discount=0.5", "discount it in the workflow"),
        ("critic.optimizer.beta1=0.8", "critic.optim.betas"),
        ("actor.rejection_sampling.metric=kl", "only the ratio"),
        ("actor.ppo_n_minibatches=3", "256 does not divide evenly by 3"),
        ("gconfig.min_new_tokens=5", "any token"),
        ("gconfig.frequency_penalty=0.5", "punish repetition in the reward function"),
        ("gconfig.repetition_penalty=1.1", "punish repetition in the reward function"),
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
    "actor.optimizer.beta2=0.95": ("actor_rollout_ref.actor.optim.betas", (0.9, 0.95)),
    "actor.optimizer.eps=1e-5": ("actor_rollout_ref.actor.optim.eps", 1e-5),
    "actor.megatron.fp8_config.mode=hybrid": ("actor_rollout_ref.actor.megatron.fp8", "hybrid"),
    "actor.megatron.moe_router_dtype=fp32": (
        "actor_rollout_ref.actor.megatron.override_transformer_config",
        {"moe_router_dtype": "fp32"},
    ),
    "eps_clip=0.3": ("actor_rollout_ref.actor.clip_ratio", 0.3),
    "group_size=4": ("actor_rollout_ref.rollout.n", 4),
    "reward_bias=-0.5": ("algorithm.reward_bias", -0.5),
    "kl_ctl=0.1": ("algorithm.kl_ctrl.kl_coef", 0.1),
    "gae_lambda=0.9": ("algorithm.lam", 0.9),
    "group_adv_norm=true": ("algorithm.adv_norm.mean_level", "group"),
    "ref.path=model": ("actor_rollout_ref.ref.model.path", "model"),
}


@pytest.mark.parametrize("argument", NAMES)
def test_each_name_of_areal_sets_its_key(argument: str) -> None:
    job = ["actor.path=model", "data.train_files=rows.jsonl", "trainer.rollout_workers=2", "trainer.n_gpus_per_node=2"]
    engine = "actor_rollout_ref.rollout.name=sglang"
    more = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=32", engine]
    path, value = NAMES[argument]
    group = [] if path.endswith("rollout.n") else ["actor_rollout_ref.rollout.n=8"]
    assert value_at(load_config([*job, *more, *group, argument]), path) == value


def test_a_configuration_in_python_is_the_file_of_a_grpo_run() -> None:
    config = areal.GRPOConfig(
        actor=areal.PPOActorConfig(path="model", eps_clip=0.3, lr=2e-6, group_reward_norm=True),
        rollout=areal.RolloutConfig(n_generations=4, max_tokens=64, batch_size=32),
        train_dataset=areal.DatasetConfig(name="openai/gsm8k", split="main:train", shuffle=False, num_workers=4),
        eval_dataset=areal.DatasetConfig(path="rows.jsonl"),
        sglang=areal.SGLangConfig(tp_size=1, attention_backend="triton"),
        allocation_mode="sglang:d1+fsdp:d1",
        async_training=True,
    )
    cfg = load_config([*config.arguments(), "actor_rollout_ref.actor.ppo_mini_batch_size=32"])
    policy = cfg.actor_rollout_ref
    assert (cfg.data.train_files, cfg.data.val_files, cfg.data.shuffle) == (
        ("openai/gsm8k:main:train",),
        ("rows.jsonl",),
        False,
    )
    assert (policy.actor.clip_ratio_high, policy.actor.optim.lr, policy.rollout.n) == (0.3, 2e-6, 4)
    assert policy.rollout.engine_kwargs.sglang == {"attention_backend": "triton"}
    assert (cfg.trainer.max_staleness, cfg.trainer.rollout_workers, config.actor.eps_clip) == (1, 1, 0.3)
    with pytest.raises(ConfigError, match="no such key"):
        load_config([*config.arguments(), *areal.GRPOConfig(actor=areal.PPOActorConfig(eps_clop=1)).arguments()])
    local = load_config([*config.arguments(), "train_dataset.name=rows.jsonl", "train_dataset.split=null"])
    assert local.data.train_files == ("rows.jsonl",)


@pytest.mark.parametrize(("arguments", "versions"), [([], 1), (["rollout.max_head_offpolicyness=4"], 4)])
def test_asynchronous_training_is_one_step_off_or_as_many_as_are_set(arguments: list[str], versions: int) -> None:
    for argv in (["async_training=true", *arguments], [*arguments, "async_training=true"]):
        cfg = load_config(["actor.path=model", "data.train_files=rows.jsonl", "trainer.rollout_workers=1", *argv])
        assert cfg.trainer.max_staleness == versions


def test_settings_of_areals_scripts_are_arguments_of_the_workflow() -> None:
    own = ["max_turns=3", "max_tokens_per_trajectory=900", "econfig={domain: airline, max_steps: 50}"]
    agent = load_config(["--config-name=./grpo.yaml", "workflow=my.Workflow", *own]).actor_rollout_ref.rollout.agent
    assert agent.workflow_kwargs == {
        "max_turns": 3,
        "max_tokens": 900,
        "econfig": {"domain": "airline", "max_steps": 50},
    }


def test_training_takes_the_nodes_of_areals_cluster_that_it_needs() -> None:
    two = ["cluster.n_nodes=5", "rollout.backend=sglang:d16", "actor.backend=archon:d24"]
    loaded = load(parse_arguments(["--config-name=./grpo.yaml", *two, "train_dataset.batch_size=192"]), PPOConfig)
    trainer = loaded.config.trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.rollout_workers) == (3, 8, 16)
    assert any("cluster.n_nodes (trainer.nnodes=3 from" in note for note in loaded.notes)


def test_what_only_adds_to_a_setting_of_areal_is_noted() -> None:
    more = ["saver.freq_steps=10", "saver.freq_secs=3600", "actor.prox_logp_method=metrics"]
    packs = ["actor.mb_spec.max_tokens_per_mb=1000", "actor.megatron.fp8_config.param=true"]
    loaded = load(parse_arguments(["--config-name=./grpo.yaml", *more, *packs]), PPOConfig)
    assert loaded.config.trainer.save_freq == 10
    assert loaded.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 1724  # the longest prompt and response
    notes = "\n".join(loaded.notes)
    for key in ("saver.freq_epochs", "saver.freq_secs", "prox_logp_method", "max_tokens_per_mb", "fp8_config.param"):
        assert key in notes


SUPERVISED = """
experiment_name: sft
trial_name: trial0
seed: 3
total_train_epochs: 2
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: experiments}
actor:
  backend: "megatron:d2t2p2"
  path: model
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 4096, granularity: 2}
  optimizer: {type: adam, lr: 2e-5, weight_decay: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-5, gradient_clipping: 0.5}
  %s
train_dataset: {batch_size: 128, shuffle: true, path: rows.jsonl, type: %s, max_length: 700}
valid_dataset: {batch_size: 128, path: rows.jsonl, type: %s}
saver: {freq_epochs: 1}
evaluator: {freq_epochs: null, freq_steps: 20}
"""
JOBS = {
    "sft": (SFTConfig, "is_critic: false"),
    "rw": (RMConfig, "is_critic: true"),
    "dpo": (DPOConfig, "{beta: 0.2, loss_type: ipo}"),
}


@pytest.mark.parametrize("kind", JOBS)
def test_supervised_files_are_read_as_they_stand(folder: Path, kind: str) -> None:
    schema, more = JOBS[kind]
    text = SUPERVISED % (more.strip("{}").replace(", ", "\n  "), kind, kind)
    (folder / "job.yaml").write_text(text)
    cfg = load_config(["--config-name=./job.yaml"], schema)
    megatron, optim, trainer = cfg.engine.megatron, cfg.optim, cfg.trainer
    assert (cfg.engine.strategy, cfg.engine.dtype, trainer.n_gpus_per_node) == ("megatron", "bfloat16", 8)
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (2, 2)
    assert (optim.lr, optim.weight_decay, optim.betas, optim.eps, optim.clip_grad) == (
        2e-5,
        0.05,
        (0.9, 0.95),
        1e-5,
        0.5,
    )
    assert (cfg.data.train_files, cfg.data.val_files, cfg.data.max_length) == (("rows.jsonl",), ("rows.jsonl",), 700)
    assert (cfg.data.train_batch_size, cfg.data.max_token_len_per_gpu, cfg.data.seed) == (128, 4096, 3)
    assert (trainer.save_freq, trainer.test_freq, trainer.total_epochs) == ("after_each_epoch", 20, 2)
    if isinstance(cfg, DPOConfig):
        assert (cfg.dpo.beta, cfg.dpo.loss_type) == (0.2, "ipo")
    with pytest.raises(ConfigError, match="other types"):
        load_config(["--config-name=./job.yaml", "train_dataset.type=rl"], schema)
    with pytest.raises(ConfigError, match="set an engine that trains"):
        load_config(["--config-name=./job.yaml", "actor.backend=sglang:d8"], schema)


def test_the_share_of_accepted_files_is_printed_with_the_reasons(folder: Path) -> None:
    (folder / "bad.yaml").write_text(f"{GRPO}dynamic_bs: true\n")
    (folder / "tir").mkdir()
    (folder / "tir" / "tir.yaml").write_text(f"{GRPO}tir: {{max_turns: 2}}\n")
    (folder / "tir" / "train.py").write_text('trainer.train(workflow="tir.workflow.TIRWorkflow")\n')
    (folder / "vlm.yaml").write_text(GRPO)
    command = [sys.executable, ROOT / "scripts/areal_files.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled_s(60), check=True)
    share, kinds, reason, apart = done.stdout.splitlines()
    assert (share, kinds) == ("2 of 3 files are accepted (67%)", "by kind: rl 2 of 3")
    assert reason.startswith("    1 dynamic_bs: a step has")
    assert apart == "not counted: 1 images"
