"""Layers, spellings, references, presets and what is printed."""

import logging
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from rlsys.config import DPOConfig, EvalConfig, PPOConfig, RMConfig, SFTConfig, load_config, main_config
from rlsys.config.arguments import parse_arguments
from rlsys.config.compat.reader import FILES, compat_table, read_blocks
from rlsys.config.help import describe
from rlsys.config.introspect import default_of, leaves, sections
from rlsys.config.load import load
from rlsys.config.presets import preset_names, presets_folder
from rlsys.config.schema.base import Section
from rlsys.config.vocabulary import ADV_ESTIMATORS
from rlsys.data.start_assets import START_MODEL
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s

JOBS = [PPOConfig, SFTConfig, RMConfig, DPOConfig, EvalConfig]
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    (tmp_path / "some" / "model").mkdir(parents=True)
    (tmp_path / "some" / "model" / "config.json").write_text('{"hidden_size": 8}')
    return tmp_path


def notes(argv: list[str], schema: type[Section] = PPOConfig) -> str:
    return "\n".join(load(parse_arguments(argv), schema).notes)


def value(cfg: Section, path: str) -> object:
    node: object = cfg
    for part in path.split("."):
        node = getattr(node, part)
    return node


# The schema


@pytest.mark.parametrize("schema", JOBS)
def test_every_key_is_described(schema: type[Section]) -> None:
    for path, section in sections(schema).items():
        assert section.__doc__, path
        for name in section.model_fields:
            key = f"{path}.{name}" if path else name
            if key in leaves(schema):
                assert describe(section, name), key


@pytest.mark.parametrize("schema", JOBS)
def test_every_default_is_itself_valid(schema: type[Section], folder: Path) -> None:
    (folder / "bare.yaml").write_text("")
    files = ["data.train_files=null", "data.val_files=null"] if schema is PPOConfig else []
    load_config(["--config-name=./bare.yaml", *files], schema)


@pytest.mark.parametrize("schema", JOBS)
def test_no_key_is_also_a_key_of_another_project(schema: type[Section]) -> None:
    table = compat_table(schema)
    assert not set(table.aliases) & set(leaves(schema))
    shadowed = {key for key in table.foreign if key in leaves(schema)}
    allowed = {
        key for key in shadowed if key.endswith(("optimizer_offload", "strategy", "ulysses_sequence_parallel_size"))
    }
    assert shadowed == allowed


@pytest.mark.parametrize("schema", JOBS)
def test_every_spelling_leads_to_a_key(schema: type[Section]) -> None:
    table = compat_table(schema)
    ends = {*leaves(schema), *sections(schema), *table.expansions, *table.foreign, *table.engines}
    for spelling in table.aliases:
        key = table.canonical(spelling)
        is_inside = any(part in key for part in ("engine_kwargs", "runtime_env", "_transformer_", "workflow_kwargs"))
        assert key in ends or "lora" in spelling or is_inside, spelling
    assert set(table.meanings.values()) <= set(leaves(schema))
    expanded = {key for keys in table.expansions.values() for key in keys}
    assert expanded <= set(leaves(schema))


def test_no_spelling_or_foreign_key_is_in_two_files() -> None:
    for schema in JOBS:
        job = schema.__name__.removesuffix("Config").lower()
        names = [
            (kind == "expansions", name)
            for file in FILES
            for block in read_blocks(file)
            if job in block.get("jobs", ())
            for kind in ("aliases", "expansions", "ignored", "refused")
            for name in block.get(kind, ())
        ]
        assert len(names) == len(set(names))


VERL_DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.shuffle": True,
    "data.truncation": "error",
    "data.filter_overlong_prompts": False,
    "data.filter_overlong_prompts_workers": 1,
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "data.validation_shuffle": False,
    f"{M}.enable_gradient_checkpointing": True,
    f"{M}.use_remove_padding": True,
    f"{M}.lora_rank": 0,
    f"{M}.lora_alpha": 16,
    f"{M}.target_modules": ("all-linear",),
    f"{A}.strategy": "fsdp",
    f"{A}.ppo_mini_batch_size": 256,
    f"{A}.ppo_micro_batch_size_per_gpu": None,
    f"{A}.use_dynamic_bsz": True,
    f"{A}.ppo_max_token_len_per_gpu": 16384,
    f"{A}.ppo_epochs": 1,
    f"{A}.shuffle": False,
    f"{A}.data_loader_seed": 42,
    f"{A}.clip_ratio": 0.2,
    f"{A}.clip_ratio_low": 0.2,
    f"{A}.clip_ratio_high": 0.2,
    f"{A}.clip_ratio_c": 3.0,
    f"{A}.tau_pos": 1.0,
    f"{A}.tau_neg": 1.05,
    f"{A}.loss_agg_mode": "token-mean",
    f"{A}.entropy_coeff": 0.0,
    f"{A}.use_kl_loss": False,
    f"{A}.kl_loss_coef": 0.001,
    f"{A}.kl_loss_type": "low_var_kl",
    f"{A}.grad_clip": 1.0,
    f"{A}.ulysses_sequence_parallel_size": 1,
    f"{A}.policy_loss.loss_mode": "vanilla",
    f"{A}.policy_loss.clip_cov_ratio": 0.0002,
    f"{A}.policy_loss.kl_cov_ratio": 0.0002,
    f"{A}.policy_loss.ppo_kl_coef": 0.1,
    f"{A}.optim.lr": 1e-6,
    f"{A}.optim.weight_decay": 0.01,
    f"{A}.optim.lr_warmup_steps": -1,
    f"{A}.optim.lr_warmup_steps_ratio": 0.0,
    f"{A}.optim.lr_scheduler_type": "constant",
    f"{A}.optim.betas": (0.9, 0.999),
    f"{A}.fsdp_config.fsdp_size": -1,
    f"{A}.fsdp_config.param_offload": False,
    f"{A}.fsdp_config.model_dtype": "float32",
    f"{A}.checkpoint.save_contents": ("model", "optimizer", "extra"),
    f"{R}.temperature": 1.0,
    f"{R}.top_k": -1,
    f"{R}.top_p": 1.0,
    f"{R}.do_sample": True,
    f"{R}.n": 1,
    f"{R}.seed": 42,
    f"{R}.max_num_seqs": 256,
    f"{R}.val_kwargs.temperature": 0.0,
    f"{R}.val_kwargs.do_sample": False,
    f"{R}.checkpoint_engine.update_weights_bucket_megabytes": 2048,
    "actor_rollout_ref.nccl_timeout": 600.0,
    "critic.optim.lr": 1e-5,
    "critic.ppo_mini_batch_size": 256,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.forward_max_token_len_per_gpu": 32768,
    "critic.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": "2.0",
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "reward.num_workers": 8,
    "reward.custom_reward_function.name": "compute_score",
    "reward.reward_manager.name": "naive",
    "reward.reward_model.enable": False,
    "reward.sandbox_fusion.memory_limit_mb": 1024,
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
    "trainer.critic_warmup": 0,
    "trainer.balance_batch": True,
    "trainer.resume_mode": "auto",
    "trainer.log_val_generations": 0,
    "trainer.deadlines.start_s": 300.0,
}


def test_defaults_are_verls(folder: Path) -> None:
    (folder / "bare.yaml").write_text("")
    cfg = load_config(["--config-name=./bare.yaml", "data.train_files=train.parquet", "data.val_files=test.parquet"])
    assert {key: value(cfg, key) for key in VERL_DEFAULTS} == VERL_DEFAULTS


def test_gspo_is_averaged_by_sequences_unless_a_mode_is_set() -> None:
    gspo, mode = f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode"
    assert value(load_config([gspo]), mode) == "seq-mean-token-mean"
    assert value(load_config([gspo, f"{mode}=token-mean"]), mode) == "token-mean"
    of_critic = [load_config([gspo, *own]).critic.loss_agg_mode for own in ([], [f"{mode}=token-sum"])]
    assert of_critic == ["token-mean", "token-sum"], "a critic's loss is only averaged by sequences where that is set"
    assert value(load_config(["actor.importance_sampling_level=sequence"]), mode) == "token-mean"


def test_a_configuration_is_frozen_and_travels() -> None:
    cfg = load_config([])
    with pytest.raises(ValueError, match="frozen"):
        cfg.data.seed = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(cfg)) == cfg


# Spellings


SAME = [
    ("custom_reward_function.name=f", "reward.custom_reward_function.name", "f"),
    ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
    ("reward_model.num_workers=3", "reward.num_workers", 3),
    ("reward_model.reward_kwargs.max_resp_len=8", "reward.reward_kwargs.max_resp_len", 8),
    ("reward_model.micro_batch_size_per_gpu=8", "reward.reward_model.micro_batch_size_per_gpu", 8),
    ("sandbox_fusion.memory_limit_mb=99", "reward.sandbox_fusion.memory_limit_mb", 99),
    ("critic.model.fsdp_config.param_offload=true", "critic.fsdp.param_offload", True),
    ("critic.optim.clip_grad=2.0", "critic.grad_clip", 2.0),
    (f"{A}.optim.clip_grad=2.0", f"{A}.grad_clip", 2.0),
    (f"{M}.override_config.model_config.rope_theta=5", f"{M}.override_config", {"rope_theta": 5}),
    (f"{A}.optim.warmup_style=cosine", f"{A}.optim.lr_scheduler_type", "cosine"),
    (f"{A}.ppo_micro_batch_size=4", f"{A}.ppo_micro_batch_size_per_gpu", 4),
    (f"{A}.fsdp_config.mixed_precision.param_dtype=bf16", f"{A}.fsdp_config.dtype", "bfloat16"),
    (f"{A}.eps_clip=0.3", f"{A}.clip_ratio", 0.3),
    (f"{A}.c_clip=4.0", f"{A}.clip_ratio_c", 4.0),
    (f"{A}.megatron.override_transformer_config.fp8=hybrid", f"{A}.megatron.fp8", "hybrid"),
    (f"{R}.group_size=4", f"{R}.n", 4),
    (f"{R}.prompt_length=20", "data.max_prompt_length", 20),
    (f"{R}.update_weights_bucket_megabytes=64", f"{R}.checkpoint_engine.update_weights_bucket_megabytes", 64),
    (f"{R}.checkpoint_engine.backend=naive", f"{R}.checkpoint_engine.backend", "auto"),
    (f"{R}.dtype=fp32", f"{R}.dtype", "float32"),
    (f"{R}.top_k=0", f"{R}.top_k", -1),
    (f"{R}.rollout_backend=hf", f"{R}.name", "hf"),
    (f"{R}.max_running_requests=9", f"{R}.max_num_seqs", 9),
    (f"{R}.vllm.enable_prefix_caching=false", f"{R}.enable_prefix_caching", False),
    (f"{R}.sglang.use_torch_compile=true", f"{R}.engine_kwargs.sglang", {"enable_torch_compile": True}),
    ("algorithm.kl_ctl=0.1", "algorithm.kl_ctrl.kl_coef", 0.1),
    ("algorithm.kl_ctl=0.1", "algorithm.use_kl_in_reward", True),
    ("algorithm.kl_ctl=0.0", "algorithm.use_kl_in_reward", False),
    ("algorithm.adv_norm=true", "algorithm.adv_norm.mean_level", "batch"),
    ("algorithm.group_reward_norm=true", "algorithm.reward_norm.std_level", "group"),
    ("algorithm.discount=0.9", "algorithm.gamma", 0.9),
    ("actor.use_decoupled_loss=true", "algorithm.rollout_correction.rollout_is", "token"),
    ("actor.behav_imp_weight_cap=5.0", "algorithm.rollout_correction.rollout_is_threshold", "0_5.0"),
    ("actor.group_size=4", f"{R}.n", 4),
    ("actor.reward_scaling=10", "algorithm.reward_scaling", 10.0),
    ("gconfig.max_new_tokens=6", "data.max_response_length", 6),
    ("trainer.ray_wait_register_center_timeout=60", "trainer.deadlines.start_s", 60.0),
    ("ray_init.num_cpus=2", "ray_kwargs.ray_init.num_cpus", 2),
    ("data.trust_remote_code=true", f"{M}.trust_remote_code", True),
]


@pytest.mark.parametrize(("argument", "key", "expected"), SAME, ids=[case[0] for case in SAME])
def test_other_spellings_mean_the_same(argument: str, key: str, expected: object) -> None:
    assert value(load_config([argument]), key) == expected


SWITCHED = """
actor_rollout_ref:
  rollout:
    group_name: "RolloutGroup"
    gpu_memory_utilization: 0.55
    model_dir: some/model
    model_arch: qwen2.5
    enforce_eager: False
    distributed_executor_backend: mp
    disable_log_stats: False
    detokenize: False
    padding: null
    eos: null
    rollout_backend: sglang
    sglang:
      attention_backend: triton
      decode_log_interval: 500000
      use_torch_compile: False
      torch_compile_max_bs: 128
    vllm:
      attention_backend: FLASH_ATTN
      enable_chunked_prefill: True
      enable_prefix_caching: True
      enable_flash_infer_sampler: True
    tensor_parallel_size: 1
    pipeline_parallel_size: 1
    validate_weight: False
    validate_save_dir: null
    print_outputs: False
    max_running_requests: 64
    cuda_graph_max_bs: 128
"""
"""What the guide to switching engines sets, as it stands there."""


def test_every_key_of_the_guide_to_switching_engines_reaches_its_setting(folder: Path) -> None:
    (folder / "switched.yaml").write_text(SWITCHED)
    job = ["--config-name=./switched.yaml", "data.train_files=train.parquet", "data.val_files=test.parquet"]
    policy = load_config(job).actor_rollout_ref
    rollout = policy.rollout
    assert (policy.model.path, rollout.name) == ("some/model", "sglang")
    assert (rollout.gpu_memory_utilization, rollout.enforce_eager, rollout.disable_log_stats) == (0.55, False, False)
    assert (rollout.max_num_seqs, rollout.cuda_graph_max_bs, rollout.tensor_model_parallel_size) == (64, 128, 1)
    assert (rollout.enable_chunked_prefill, rollout.enable_prefix_caching, rollout.print_outputs) == (True, True, False)
    assert (rollout.padding, rollout.eos, rollout.validate_weight, rollout.validate_save_dir) == (
        None,
        None,
        False,
        None,
    )
    assert rollout.engine_kwargs.vllm == {"attention_backend": "FLASH_ATTN"}
    assert rollout.engine_kwargs.sglang == {
        "attention_backend": "triton",
        "decode_log_interval": 500000,
        "enable_torch_compile": False,
        "torch_compile_max_bs": 128,
    }
    other = load_config([*job, f"{R}.rollout_backend=vllm", f"{R}.eos=[2,3]", f"{R}.padding=5"]).actor_rollout_ref
    assert (other.rollout.name, other.rollout.eos, other.rollout.padding) == ("vllm", (2, 3), 5)
    printed = notes(job)
    for name in ("group_name", "model_arch", "distributed_executor_backend", "enable_flash_infer_sampler"):
        assert name in printed


def test_both_spellings_may_agree() -> None:
    assert load_config([f"{A}.clip_ratio=0.3", f"{A}.eps_clip=0.3"]).actor_rollout_ref.actor.clip_ratio == 0.3


def test_a_later_layer_wins_under_either_spelling() -> None:
    assert load_config(["reward_model.num_workers=5"]).reward.num_workers == 5  # quickstart says reward.num_workers


def test_what_is_refused_may_be_taken_back_later() -> None:
    refused = [f"{M}.mtp.enable_train=true", "trainer.v1.trainer_mode=colocate_async"]
    with pytest.raises(ConfigError, match="heads are not trained"):
        load_config(refused)
    load_config([*refused, f"{M}.mtp.enable_train=false", "trainer.v1.trainer_mode=sync"])


def test_sizes_over_all_ranks_are_divided_and_followed() -> None:
    cfg = load_config([f"{A}.ppo_micro_batch_size=8", "trainer.n_gpus_per_node=2", f"{A}.use_dynamic_bsz=false"])
    assert cfg.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert cfg.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 4


def test_spellings_of_the_other_jobs() -> None:
    cfg = load_config(["ulysses_sequence_parallel_size=1", "trainer.seed=7", "use_remove_padding=false"], SFTConfig)
    assert (cfg.data.seed, cfg.model.use_remove_padding) == (7, False)
    assert load_config(["rollout.max_num_seqs=3"], EvalConfig).actor_rollout_ref.rollout.max_num_seqs == 3


def test_a_target_of_your_own_keys_stays_and_those_of_verls_sections_go(folder: Path) -> None:
    (folder / "own.yaml").write_text(
        "defaults: [quickstart]\nactor_rollout_ref: {_target_: x.Y}\n"
        "distillation: {teacher_models: {a: {_target_: verl.Teacher, model_path: a}}}\n"
        "custom_reward_function: {reward_kwargs: {judge: {_target_: my.Judge, depth: 2}}}\n"
    )
    (folder / "own.py").write_text("def compute_score(): ...")
    config = load_config(["--config-name=./own.yaml", "reward.custom_reward_function.path=own.py"])
    assert config.reward.custom_reward_function.reward_kwargs == {"judge": {"_target_": "my.Judge", "depth": 2}}
    assert config.distillation.teacher_models["a"].model_path == "a"
    own = "+data.apply_chat_template_kwargs.tool"
    config = load_config([f"{own}._target_=my.Tool", f"{own}.n=1"])
    assert config.data.apply_chat_template_kwargs == {"tool": {"_target_": "my.Tool", "n": 1}}


def test_a_section_of_nulls_from_an_old_file_sets_nothing(folder: Path) -> None:
    (folder / "old.yaml").write_text(
        "defaults: [quickstart]\ncustom_reward_function: {path: null, name: null}\n"
        "reward_model: {enable: null, num_workers: null, rollout: {name: null}, model: {path: null}}\n"
        "sandbox_fusion: {url: null, memory_limit_mb: null}\nactor_rollout_ref: {_target_: x.Y}\n"
    )
    assert load_config(["--config-name=./old.yaml"]) == load_config(["--config-name=quickstart"])


# Keys of other systems


def test_ignored_settings_are_noted_in_one_line_for_each_reason() -> None:
    printed = notes(["trainer.controller_nsight_options=x", "trainer.npu_profile=true", "trainer.v1.sampler=x"])
    assert printed.count("\n") == 1
    assert "ignored: trainer.controller_nsight_options, trainer.npu_profile (" in printed
    assert "trainer.v1.sampler" in printed


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ("trainer.profile_steps=2 global_profiler.ranks=0", ""),
        (
            "global_profiler.steps=[2,26]",
            "global_profiler.steps = [2,26]: the run ends with step 25; later ones are not",
        ),
        ("global_profiler.steps=[2] global_profiler.ranks=[0,7]", ""),
        (
            "global_profiler.steps=[2] global_profiler.ranks=[7]",
            "ranks = [7]: no process is profiled: ranks are below 1",
        ),
        ("global_profiler.steps=[2] global_profiler.ranks=[]", "ranks = []: no process is profiled"),
        ("global_profiler.steps=[2] global_profiler.ranks=null", ""),
        ("global_profiler.steps=[2] global_profiler.tool=torch_memory trainer.device=cuda", ""),
        (
            "global_profiler.steps=[2] global_profiler.tool=torch_memory trainer.device=cpu",
            "global_profiler.tool = torch_memory: it needs a GPU, so nothing is profiled; set",
        ),
        (
            "global_profiler.global_tool_config.torch_memory.stack_depth=32",
            "stack_depth (a profile has operators, kernels",
        ),
    ],
)
def test_steps_and_ranks_that_a_run_does_not_have_are_not_profiled_and_noted(settings: str, note: str) -> None:
    printed = notes(["--config-name=quickstart", *settings.split()])
    assert (note in printed) if note else not printed


def test_settings_of_fsdp_are_noted_in_a_job_on_megatron() -> None:
    setting = f"{A}.fsdp_config.param_offload=true"
    assert f"ignored: {A}.fsdp_config.param_offload (only used with" in notes([setting, f"{A}.strategy=megatron"])
    assert "ignored" not in notes([setting])


@pytest.mark.parametrize(
    ("setting", "asks_for_it"),
    [
        ("critic.ppo_epochs=2", "algorithm.adv_estimator=gae"),
        (f"{R.removesuffix('.rollout')}.ref.fsdp_config.param_offload=true", f"{A}.use_kl_loss=true"),
        (f"{A}.kl_loss_coef=0.2", f"{A}.use_kl_loss=true"),
        ("algorithm.kl_ctrl.kl_coef=0.2", "algorithm.use_kl_in_reward=true"),
        ("algorithm.lam=0.9", "algorithm.adv_estimator=gae"),
        ("algorithm.gamma=0.9", "algorithm.adv_estimator=reinforce_plus_plus"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_estimator=grpo_passk"),
        (f"{R}.val_kwargs.top_p=0.9", f"{R}.val_kwargs.do_sample=true"),
        (f"{R}.parity.rows=2", f"{R}.parity.freq=0"),
        ("algorithm.filter_groups.metric=acc", "algorithm.filter_groups.enable=true"),
        (f"{A}.megatron.tensor_model_parallel_size=1", f"{A}.strategy=megatron"),
    ],
)
def test_settings_that_nothing_else_asks_for_are_noted(setting: str, asks_for_it: str) -> None:
    idle = (
        "algorithm.adv_estimator=rloo",
        f"{R}.val_kwargs.n=1",
        f"{R}.val_kwargs.do_sample=false",
        f"{R}.parity.freq=-1",
    )
    key = setting.partition("=")[0]
    assert f"ignored: {key} (" in notes([*idle, setting])
    assert f"ignored: {key} (" not in notes([*idle, asks_for_it, setting])
    assert "ignored" not in notes(list(idle))


@pytest.mark.parametrize("name", sorted({*ADV_ESTIMATORS} - {"gae", "reinforce_plus_plus", "remax"}))
def test_every_estimator_that_compares_answers_needs_several(name: str) -> None:
    settings = [f"algorithm.adv_estimator={name}", *(["algorithm.gdpo_reward_keys=[a]"] if name == "gdpo" else [])]
    load_config([*settings, f"{R}.n=2"])
    if name in ("grpo", "rloo"):
        assert f"algorithm.adv_estimator = {name}: with one answer to a prompt there is nothing" in notes(
            [*settings, f"{R}.n=1"]
        )
    else:
        with pytest.raises(ConfigError, match=f"algorithm.adv_estimator = {name}: it compares several answers"):
            load_config([*settings, f"{R}.n=1"])


def test_adapters_that_no_other_tool_could_load_are_noted() -> None:
    saved = f"{A}.checkpoint.save_contents"
    assert f"{saved} = [model,optimizer,extra]: adapters cannot be merged later" in notes([f"{M}.lora_rank=4"])
    whole = f"{saved}=[model,optimizer,extra,hf_model]"
    assert saved not in notes([f"{M}.lora_rank=4", whole]) + notes([])


@pytest.mark.parametrize(
    ("setting", "package"),
    [
        (f"{M}.lora_rank=4", "peft"),
        (f"{M}.lora_adapter_path=org/adapter", "peft"),
        (f"{A}.optim.optimizer=AdamW8bit", "bitsandbytes"),
    ],
)
def test_a_package_that_is_missing_is_named(setting: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [setting, f"{A}.optim.optimizer_impl={'bitsandbytes' if 'Adam' in setting else 'torch'}.optim"]
    says = f"{setting.replace('=', ' = ')}: {package} is not installed; pip install -e"
    load_config(settings)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(settings)


def test_equal_answers_of_an_evaluation_are_noted() -> None:
    sampled = [
        f"{M}.path={START_MODEL}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"{R}.val_kwargs.n=3",
        f"{R}.val_kwargs.do_sample=true",
    ]
    greedy = [*sampled, f"{R}.val_kwargs.do_sample=false", f"{R}.val_kwargs.temperature=1"]
    assert f"{R}.val_kwargs.n = 3: temperature=0 is greedy, so all answers" in notes(sampled, EvalConfig)
    assert f"{R}.val_kwargs.n = 3: do_sample=false is greedy, so all answers" in notes(greedy, EvalConfig)
    assert "val_kwargs" not in notes([*sampled, f"{R}.val_kwargs.temperature=1"], EvalConfig)


def test_a_folder_of_no_checkpoint_is_not_used_to_resume_automatically() -> None:
    assert "trainer.resume_from_path = checkpoints/: not used" in notes(["trainer.resume_from_path=checkpoints/"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("offload_policy=true", "param_offload=true"), "ignored: {key} (offload_policy already keeps it"),
        (("offload_policy=true", "optimizer_offload=true"), "ignored: {key} (offload_policy already keeps it"),
        (
            ("trainer.device=cuda", f"{R}.name=vllm", f"{R}.expert_parallel_size=2"),
            "{key} = 2: vllm divides whole experts among the 1 processes of a copy, whatever the number",
        ),
        (("trainer.device=cuda", f"{R}.name=vllm", f"{R}.kv_cache_gib=8"), "ignored: {key} (on GPUs the cache has its"),
        (
            ("trainer.device=cpu", f"{R}.name=vllm", f"{R}.gpu_memory_utilization=0.6"),
            "ignored: {key} (it is a share of a GPU; on CPUs the policy's cache has actor_rollout_ref.rollout.kv_",
        ),
        (("trainer.device=cpu", f"{R}.name=vllm", f"{R}.cuda_graph_max_bs=8"), "ignored: {key} (CPUs have no CUDA"),
        (
            (f"{R}.name=vllm", f"{R}.enforce_eager=true", f"{R}.cuda_graph_max_bs=8"),
            "ignored: {key} (there are no CUDA",
        ),
    ],
)
def test_what_only_changes_memory_and_speed_is_noted(argv: tuple[str, ...], says: str) -> None:
    argv = tuple(word if "." in word else f"{A}.fsdp_config.{word}" for word in argv)
    printed = notes(list(argv))
    assert says.format(key=argv[-1].partition("=")[0]) in printed
    assert says.format(key=argv[-1].partition("=")[0]) not in notes(list(argv[:-1]))


def test_a_validation_temperature_without_sampling_is_noted() -> None:
    says, key = "do_sample=false is greedy, so temperature has no effect", f"{R}.val_kwargs.temperature"
    greedy = f"{R}.val_kwargs.do_sample=false"
    assert f"{key} = 0.7: {says}" in notes([f"{key}=0.7", greedy])
    assert says not in notes([f"{key}=0.7"])
    assert says not in notes([f"{key}=0", greedy])


def test_settings_of_another_engine_are_noted() -> None:
    printed = notes([f"{R}.gpu_memory_utilization=0.6", f"{R}.enforce_eager=true"])
    assert f"gpu_memory_utilization, enforce_eager only apply to {R}.name=sglang and vllm; ignored for hf" in printed
    steps = [f"{R}.name=sglang", f"{R}.num_scheduler_steps=4"]
    assert f"num_scheduler_steps only apply to {R}.name=vllm; ignored for sglang" in notes(steps)
    assert not notes([f"{R}.name=vllm", f"{R}.gpu_memory_utilization=0.6", f"{R}.enforce_eager=true"])
    servers = [f"{R}.name=vllm_remote", f"{R}.servers.urls=[http://127.0.0.1:1]", f"{R}.free_cache_engine=false"]
    assert "gpu_memory_utilization, free_cache_engine cannot be changed on external servers" in notes(
        [*servers, f"{R}.gpu_memory_utilization=0.6"]
    )
    other = [f"{R}.name=sglang", f"+{R}.engine_kwargs.vllm.block_size=16"]
    assert f"they only apply to {R}.name=vllm; ignored for sglang" in notes(other)
    assert not notes([f"{R}.name=vllm", other[1]])


def test_log_probs_that_external_servers_return_are_noted() -> None:
    servers = [f"{R}.servers.urls=[http://127.0.0.1:1]", f"{R}.top_p=0.9"]
    for name, kind in (("sglang", "full"), ("vllm", "truncated")):
        printed = notes([*servers, f"{R}.name={name}_remote"])
        assert f"{R}.top_p = 0.9: the server only returns log-probs of the {kind} distribution" in printed
        assert printed.count("log-probs of the") == 1


def test_full_determinism_is_for_both_sides_and_says_what_it_is_not() -> None:
    aligned = load_config([f"{R}.full_determinism=true", f"{R}.name=vllm"])
    policy = aligned.actor_rollout_ref
    assert policy.rollout.full_determinism
    assert policy.actor.fsdp_config.full_determinism
    assert policy.actor.megatron.full_determinism
    assert policy.ref.fsdp_config.full_determinism
    assert aligned.critic.fsdp.full_determinism
    apart = load_config([f"{R}.full_determinism=true", f"{R}.name=vllm", f"{A}.fsdp_config.full_determinism=false"])
    assert not apart.actor_rollout_ref.actor.fsdp_config.full_determinism
    assert not notes([f"{R}.full_determinism=true", f"{R}.name=vllm"])
    assert "another batch" in notes([f"{R}.full_determinism=true"])
    servers = [f"{R}.name=vllm_remote", f"{R}.servers.urls=[http://127.0.0.1:1]"]
    assert "FULL_DETERMINISM=1" in notes([f"{R}.full_determinism=true", *servers])


@pytest.mark.parametrize(
    "argument",
    [f"{R}.mode=async", f"{R}.tensor_model_parallel_size=1", "trainer.use_v1=true", f"{A}.optim.optimizer=AdamW"],
)
def test_settings_that_ask_for_what_happens_anyway_are_silent(argument: str) -> None:
    assert notes([argument]) == ""


def test_old_answers_are_clipped_around_their_own_policies_unless_a_correction_is_chosen() -> None:
    ahead, key = ["trainer.max_staleness=4", "trainer.rollout_workers=1"], "algorithm.rollout_correction"
    cfg = load_config(ahead)
    assert cfg.algorithm.rollout_correction.bypass_mode
    assert cfg.actor_rollout_ref.actor.calculate_entropy
    assert "older weights" not in notes(ahead)
    assert not load_config([]).algorithm.rollout_correction.bypass_mode
    assert not load_config([*ahead, f"{key}.rollout_is=token"]).algorithm.rollout_correction.bypass_mode
    for without in (f"{key}.bypass_mode=false", f"{A}.policy_loss.loss_mode=gspo"):
        assert not load_config([*ahead, without]).algorithm.rollout_correction.bypass_mode
        assert f"older weights; set {key}.bypass_mode=true" in notes([*ahead, without])


def test_answers_of_fp8_weights_are_weighted_by_token_unless_a_correction_is_chosen() -> None:
    key, fp8 = "algorithm.rollout_correction", [f"{R}.name=vllm", f"{R}.quantization=fp8"]
    assert load_config(fp8).algorithm.rollout_correction.rollout_is == "token"
    assert load_config(fp8).actor_rollout_ref.rollout.parity.is_enabled
    assert load_config([f"{R}.name=vllm"]).algorithm.rollout_correction.rollout_is is None
    for chosen in (f"{key}.rollout_is=null", f"{key}.bypass_mode=true", "trainer.max_staleness=4"):
        workers = ["trainer.rollout_workers=1"] if "staleness" in chosen else []
        assert load_config([*fp8, chosen, *workers]).algorithm.rollout_correction.rollout_is is None


def test_notes_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(["transfer_queue.enable=true"])
    assert "transfer_queue.enable" in caplog.text


VERL_SCRIPT = """
algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=['test.parquet']
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=some/model
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=hf
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console'] trainer.project_name=verl_grpo
trainer.experiment_name=qwen3_8b trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=15 +trainer.default_hdfs_dir=null
"""


def test_a_script_written_for_verl_runs_with_the_engine_changed() -> None:
    cfg = load_config(shlex.split(VERL_SCRIPT))
    assert cfg.actor_rollout_ref.ref.fsdp_config.param_offload is True
    assert cfg.data.val_files == ("test.parquet",)
    assert cfg.trainer.default_local_dir == "checkpoints/verl_grpo/qwen3_8b"
    assert notes(shlex.split(VERL_SCRIPT)).count("\n") == 0


def test_null_takes_back_what_was_set_under_another_name() -> None:
    set_before = "custom_reward_function.path=train.parquet"
    cfg = load_config([set_before, "custom_reward_function.path=null"])
    assert cfg.reward.custom_reward_function.path is None


# References, files and presets


def test_references_are_resolved_after_all_layers() -> None:
    cfg = load_config(
        [
            "data.seed=${actor_rollout_ref.rollout.seed}",
            f"{R}.seed=5",
            "trainer.experiment_name=n${actor_rollout_ref.rollout.group_size}",
        ]
    )
    assert cfg.data.seed == 5
    assert cfg.trainer.experiment_name == "n8"
    assert cfg.trainer.default_local_dir == "checkpoints/rlsys/n8"


def test_references_in_text_are_relative_escaped_or_computed() -> None:
    texts = {
        "${.seed} of ${..trainer.nnodes}": "7 of 3",
        "${.seed}${trainer.resume_from_path}": "7None",
        r"\${.seed} for ${.seed}": "${.seed} for 7",
        "${quotient:${data.seed},${trainer.nnodes}}": "2",
        "$5 {${.seed}}": "$5 {7}",
    }
    for text, expected in texts.items():
        cfg = load_config([f"data.prompt_key='{text}'", "data.seed=7", "trainer.nnodes=3"])
        assert cfg.data.prompt_key == expected, text


def test_linked_keys_follow_unless_set() -> None:
    cfg = load_config([f"{A}.clip_ratio=0.3", "algorithm.adv_estimator=gae", f"{A}.use_dynamic_bsz=false"])
    assert cfg.actor_rollout_ref.actor.clip_ratio_low == 0.3
    assert cfg.actor_rollout_ref.actor.clip_ratio_high == 0.28  # quickstart sets it
    assert cfg.critic.use_dynamic_bsz is False
    assert cfg.critic.ppo_mini_batch_size == 48


def test_environment_variables_may_be_referred_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSYS_TEST_NAME", "here")
    assert load_config(["trainer.experiment_name=${oc.env:RLSYS_TEST_NAME}"]).trainer.experiment_name == "here"
    assert load_config(["trainer.experiment_name=${oc.env:RLSYS_NOT,there}"]).trainer.experiment_name == "there"


def test_home_folders_are_spelled_out() -> None:
    assert load_config(["trainer.default_local_dir=~/x"]).trainer.default_local_dir == str(Path.home() / "x")


def test_without_a_model_the_quickstart_runs_and_says_so() -> None:
    loaded = load(parse_arguments([f"{M}.path=null"]), PPOConfig)
    assert loaded.headline.startswith("preset quickstart with 1 override: no model was set")
    assert loaded.config.actor_rollout_ref.model.path is None


@pytest.mark.parametrize(
    "argv",
    [
        [f"{M}.path=some/model"],
        ["actor_rollout_ref={model: {path: some/model}}"],
        ["actor.path=some/model"],
        ["--config-name=ppo_trainer"],
    ],
)
def test_with_a_model_or_a_preset_verls_defaults_run(argv: list[str]) -> None:
    files = ["data.train_files=train.parquet", "data.val_files=test.parquet"]
    loaded = load(parse_arguments([*argv, *files]), PPOConfig)
    assert loaded.headline.startswith("preset ppo_trainer")
    assert loaded.config.data.train_batch_size == 1024


def test_a_file_builds_on_presets(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "base.yaml").write_text("defaults: [quickstart]\ndata: {seed: 3, train_batch_size: 96}\n")
    (folder / "mine" / "top.yaml").write_text("defaults:\n- base\n- _self_\ndata: {seed: 4}\nhydra: {run: {dir: .}}\n")
    cfg = load_config([f"--config-path={folder / 'mine'}", "--config-name", "top.yaml"])
    assert (cfg.data.seed, cfg.data.train_batch_size, cfg.actor_rollout_ref.rollout.n) == (4, 96, 8)


def test_the_folder_of_areals_files_need_not_be_there(folder: Path) -> None:
    files = ["actor.path=some/model", "data.train_files=train.parquet", "data.val_files=test.parquet"]
    loaded = load(parse_arguments(["--config", "configs/cua_grpo.yaml", *files]), PPOConfig)
    assert loaded.config.actor_rollout_ref.rollout.name == "vllm_remote"
    with pytest.raises(ConfigError, match="did you mean cua_grpo"):
        load(parse_arguments(["--config", "configs/cua_grp.yaml", *files]), PPOConfig)


def test_self_may_come_first(folder: Path) -> None:
    (folder / "top.yaml").write_text("defaults: [_self_, quickstart]\ndata: {train_batch_size: 96, seed: 4}\n")
    cfg = load_config(["--config-name=./top.yaml"])
    assert (cfg.data.train_batch_size, cfg.data.seed) == (48, 4)


SCHEMA_OF = {
    "sft_trainer": SFTConfig,
    "rm_trainer": RMConfig,
    "dpo_trainer": DPOConfig,
    "eval": EvalConfig,
    "generation": EvalConfig,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = SCHEMA_OF.get(name, PPOConfig)
    argv = [f"--config-name={name}"]
    if name.startswith(("smollm2", "agent", "vision")):
        models = ("models/SmolLM2-135M-Instruct/config.json", "data/vision/model/config.json")
        rows = [f"data/{task}/{split}.parquet" for task in ("mix", "python", "vision") for split in ("train", "test")]
        for file in (*rows, *models):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text('{"max_position_embeddings": 8192}')
        monkeypatch.setenv("RLSYS_CACHE", str(folder))
    elif name.endswith(("ppo_trainer", "ppo_megatron_trainer", "dapo", "_grpo", "lora", "one_step_off")):
        argv += [f"{M}.path=some/model", "data.train_files=train.parquet", "data.val_files=test.parquet"]
    loaded = load(parse_arguments(argv), schema)
    assert not [note for note in loaded.notes if "ignored" in note]
    assert len((presets_folder() / f"{name}.yaml").read_text().splitlines()) <= 70


# What is printed


@pytest.mark.parametrize("schema", JOBS)
def test_the_printed_configuration_gives_itself_back(
    schema: type[Section], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["trainer.experiment_name=x-1"] if schema is PPOConfig else []
    with pytest.raises(SystemExit) as left:
        main_config([*argv, "--print-config"], schema)
    assert left.value.code == 0
    text = capsys.readouterr().out
    (folder / "printed.yaml").write_text(text)
    assert load_config(["--config-name=./printed.yaml"], schema) == load_config(argv, schema)
    settings = yaml.safe_load(text)
    assert set(settings) < {name.partition(".")[0] for name in leaves(schema)}


def test_the_printed_configuration_keeps_links(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_config([f"{A}.clip_ratio=0.3", "trainer.experiment_name=first", "--print-config"], PPOConfig)
    text = capsys.readouterr().out
    assert f"# {A}.clip_ratio_low: 0.3" in text
    (folder / "printed.yaml").write_text(text)
    cfg = load_config(["--config-name=./printed.yaml", f"{A}.clip_ratio=0.1", "trainer.experiment_name=second"])
    assert cfg.actor_rollout_ref.actor.clip_ratio_low == 0.1
    assert cfg.trainer.default_local_dir == "checkpoints/rlsys/second"


def test_a_dry_run_prints_the_plan_and_leaves_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main_config(["--dry-run"], PPOConfig)
    printed = capsys.readouterr().out
    assert left.value.code == 0
    assert printed.splitlines()[0].startswith("rlsys: preset quickstart: no model was set")
    assert "384 samples" in printed
    assert printed.splitlines()[-1] == "rlsys: --dry-run: nothing was started"


def test_a_run_prints_its_plan_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = main_config(["transfer_queue.enable=true"], PPOConfig)
    printed = capsys.readouterr()
    assert isinstance(cfg, PPOConfig)
    assert "384 samples" in printed.out
    assert "rlsys: note: ignored: transfer_queue.enable" in printed.err


def printed_by(argv: list[str], schema: type[Section], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main_config(argv, schema)
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("schema", JOBS)
def test_help_all_lists_every_key_with_its_default(schema: type[Section], capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(["--help", "all"], schema, capsys)
    for key, field in leaves(schema).items():
        assert f"  {key}=" in printed or f"  {key}   (follows " in printed, key
        if default_of(field) is True:
            assert f"  {key}=true" in printed


@pytest.mark.parametrize("schema", JOBS)
def test_help_is_short_and_says_how_to_see_the_rest(schema: type[Section], capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(["--help"], schema, capsys)
    listed = [key for key in leaves(schema) if f"\n  {key}=" in printed or f"\n  {key}   (" in printed]
    assert 8 <= len(listed) <= 40
    assert len(printed.splitlines()) < 110
    assert "--help WORD" in printed


def test_help_of_a_word_is_its_section_its_key_or_the_keys_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    section = printed_by(["--help", f"{R}.val_kwargs"], PPOConfig, capsys)
    listed = [line.split("=")[0].strip() for line in section.splitlines() if not line.startswith("   ")]
    assert listed == [f"{R}.val_kwargs.{name}" for name in ("temperature", "top_k", "top_p", "n", "do_sample")]
    key = printed_by(["--help", f"{A}.eps_clip"], PPOConfig, capsys)
    assert f"  {A}.clip_ratio=0.2" in key
    assert "[a number, at least 0]" in key
    assert f"other names: {A}.eps_clip" in key
    several = printed_by(["--help", "clip_ratio"], PPOConfig, capsys)
    assert all(f"{A}.clip_ratio{end}" in several for end in ("=", "_low   (follows", "_high", "_c="))
    with pytest.raises(SystemExit) as left:
        main_config(["--help", "clip_ration"], PPOConfig)
    assert left.value.code == 2
    assert "did you mean actor_rollout_ref.actor.clip_ratio" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_by(["--version"], PPOConfig, capsys) == f"rlsys {version('rlsys')}\n"


@pytest.mark.slow
def test_the_wheel_finds_its_presets(tmp_path: Path) -> None:
    source, wheels, installed = tmp_path / "source", tmp_path / "wheels", tmp_path / "installed"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "tests", "*.egg-info")
    shutil.copytree(Path(__file__).resolve().parents[3], source, ignore=ignore)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    subprocess.run(build, check=True, timeout=scaled_s(240))
    shutil.unpack_archive(next(wheels.glob("*.whl")), installed, format="zip")
    code = "import sys; from rlsys.config import *; main_config(sys.argv[1:], PPOConfig)"
    printed = subprocess.run(
        [sys.executable, "-c", code, "--dry-run"],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=scaled_s(60),
        check=True,
    )
    assert "preset quickstart" in printed.stdout
    assert {path.stem for path in (installed / "rlsys" / "presets").iterdir()} == set(preset_names())


# The guide


def test_the_tables_of_the_guide_are_current() -> None:
    script = runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "config_tables.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["with_tables"](page) == page, "run python scripts/config_tables.py"


@pytest.mark.parametrize(
    ("argv", "key", "expected"),
    [
        (["trainer.allocation_mode=hf:d2+fsdp:d4"], "trainer.rollout_workers", 2),
        (["trainer.allocation_mode=hf[r]:d4|fsdp[a]:d4"], "trainer.n_gpus_per_node", 4),
        (['trainer.experiment_name="a,b"'], "trainer.experiment_name", "a,b"),
    ],
)
def test_what_the_guide_shows_works(argv: list[str], key: str, expected: object) -> None:
    assert value(load_config(argv), key) == expected
