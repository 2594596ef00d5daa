"""The script that measures how many of verl's commands are accepted."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlsys.config import EvalConfig, PPOConfig, SFTConfig, load_config
from rlsys.config.arguments import parse_arguments
from rlsys.config.load import load
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = """
set -xeuo pipefail
cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}
DATA=(data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']" data.train_batch_size=${BATCH:-256})
mkdir -p /somewhere; rm -rf /somewhere
uv run python3 -m verl.trainer.main_ppo "${DATA[@]}" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B trainer.logger='["console","wandb"]' \\
    ray_kwargs.ray_init.runtime_env.py_executable="uv run" %s "$@" 2>&1 | tee log.txt
"""
SFT = """
[ "$#" -lt 2 ] && exit 1
torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer engine=fsdp optim=fsdp model=hf_model \\
    model.path=Qwen/Qwen3-8B engine.ulysses_sequence_parallel_size=8 optim.min_lr=1e-6 optim.lr=1e-5
"""


def test_the_share_of_accepted_commands_is_printed_with_the_reasons(tmp_path: Path) -> None:
    scripts = {
        "good": "",
        "bad": "trainer.total_epoch=1",
        "images": "data.image_key=images actor_rollout_ref.actor.freeze_vision_tower=True",
        "audio": "data.audio_key=audios",
        "experts": "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B actor_rollout_ref.rollout.name=vllm "
        "trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.{tensor_model,expert}_parallel_size=4",
    }
    for name, override in scripts.items():
        (tmp_path / f"{name}.sh").write_text(LAUNCHER % override)
    (tmp_path / "sft.sh").write_text(SFT)
    command = [sys.executable, ROOT / "scripts/verl_commands.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled_s(60), check=True)
    share, kinds, *reasons, apart = done.stdout.splitlines()
    assert share == "4 of 5 commands are accepted (80%)"
    assert kinds == "by kind: FSDP 2 of 3, images 1 of 1, SFT 1 of 1"
    assert reasons[0].startswith("    1 trainer.total_epoch (command line): no such key")
    assert apart == "not counted: 1 audio"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 100000}')
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    return tmp_path


PPO = ["actor_rollout_ref.model.path=model", "data.train_files=rows.parquet", "data.val_files=rows.parquet"]
ASYNC = """
--config-path=config --config-name=fully_async_ppo_megatron_trainer.yaml data.train_batch_size=0
data.gen_batch_size=1 actor_rollout_ref.actor.ppo_mini_batch_size=32 rollout.total_rollout_steps=51200
async_training.require_batches=4 async_training.staleness_threshold=0.5 rollout.nnodes=2 rollout.n_gpus_per_node=4
rollout.test_freq=2 actor_rollout_ref.rollout.n=4 actor_rollout_ref.hybrid_engine=False
actor_rollout_ref.actor.optim.lr_decay_steps=51200 trainer.nnodes=2 trainer.n_gpus_per_node=8
"""


def test_asynchronous_settings_of_verl_become_steps_and_versions(folder: Path) -> None:
    cfg = load_config([*PPO, *ASYNC.split()])
    trainer = cfg.trainer
    assert (cfg.data.train_batch_size, cfg.data.gen_batch_size, trainer.total_training_steps) == (128, 128, 400)
    assert (trainer.sync_freq, trainer.test_freq, trainer.rollout_workers) == (4, 8, 8)
    assert trainer.max_staleness == 5  # 6 steps' samples from one push: its own 4, and half as many more
    assert cfg.algorithm.rollout_correction.bypass_mode
    assert cfg.actor_rollout_ref.actor.strategy == "megatron"
    again = load_config([*PPO, *ASYNC.split(), "async_training.staleness_threshold=0", "rollout.test_freq=-1"])
    assert (again.trainer.max_staleness, again.trainer.test_freq) == (3, -1)
    with pytest.raises(ConfigError, match="two names of one setting"):
        load_config([*PPO, *ASYNC.split(), "trainer.rollout_workers=3"])


def test_sglang_async_is_sglang(folder: Path) -> None:
    argv = [*PPO, "actor_rollout_ref.rollout.name=sglang_async", "actor_rollout_ref.rollout.multi_turn.enable=true"]
    rollout = load_config(argv).actor_rollout_ref.rollout
    assert (rollout.name, rollout.has_workflow) == ("sglang", True)


def test_one_step_off_policy_is_a_preset(folder: Path) -> None:
    argv = ["--config-name=one_step_off_ppo_trainer", *PPO, "rollout.nnodes=1", "rollout.n_gpus_per_node=2"]
    cfg = load_config([*argv, "algorithm.rollout_correction.rollout_is_threshold=null"])
    assert (cfg.trainer.max_staleness, cfg.trainer.rollout_workers, cfg.trainer.sync_freq) == (1, 2, 1)
    assert cfg.algorithm.rollout_correction.rollout_is_threshold == "2.0"
    assert load_config([*PPO, "actor_rollout_ref.rollout.nnodes=0"]).trainer.rollout_workers == 0


def test_an_adapter_to_start_from_needs_no_rank(folder: Path) -> None:
    argv = [*PPO, "actor_rollout_ref.model.lora_adapter_path=model"]
    (folder / "model" / "adapter_config.json").write_text("{}")
    assert load_config(argv).actor_rollout_ref.model.has_adapters


def test_separate_async_of_verls_v1_trainer_generates_one_step_ahead(folder: Path) -> None:
    argv = [*PPO, "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4"]
    pools = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
    trainer = load_config([*argv, *pools, "trainer.v1.separate_async.num_warmup_batches=1"]).trainer
    assert (trainer.max_staleness, trainer.rollout_workers, trainer.sync_freq) == (1, 2, 1)
    assert load_config([*PPO, "trainer.v1.trainer_mode=sync"]).trainer.max_staleness == 0
    with pytest.raises(ConfigError, match=r"num_warmup_batches = 2 .*set trainer\.max_staleness"):
        load_config([*argv, *pools, "trainer.v1.separate_async.num_warmup_batches=2"])
    with pytest.raises(ConfigError, match="training processes do not generate ahead"):
        load_config([*PPO, "trainer.v1.trainer_mode=colocate_async"])


def test_sizes_that_verl_and_megatron_leave_open_fit_the_processes(folder: Path) -> None:
    actor = "actor_rollout_ref.actor"
    sizes = ["trainer.n_gpus_per_node=8", f"{actor}.fsdp_config.fsdp_size=32", f"{actor}.ppo_mini_batch_size=16"]
    assert load_config([*PPO, *sizes, " "]).actor_rollout_ref.actor.fsdp_config.fsdp_size == 32
    megatron = {"tensor": 4, "pipeline": 2, "expert": 2}
    parallel = [f"{actor}.megatron.{name}_model_parallel_size={size}" for name, size in megatron.items()]
    cfg = load_config([*PPO, *sizes[::2], "model_engine=megatron", *parallel])
    assert cfg.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size == 1
    few = load_config([*PPO, "trainer.n_gpus_per_node=16", sizes[2], "model_engine=megatron", *parallel])
    assert few.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size is None


def test_adapters_are_scaled_by_more_than_0_and_use_lora_of_areal_switches_them(folder: Path) -> None:
    none = load_config([*PPO, "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=0"])
    assert not none.actor_rollout_ref.model.has_adapters
    with pytest.raises(ConfigError, match="lora_alpha = 0: it multiplies adapters by 0"):
        load_config([*PPO, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=0"])
    ranks = {"true": 32, "false": 0}
    for flag, rank in ranks.items():
        assert load_config([*PPO, f"actor.use_lora={flag}"]).actor_rollout_ref.model.lora_rank == rank
    for flag in ("true", "${rollout.use_lora}"):
        both = load_config([*PPO, f"actor.use_lora={flag}", "actor.lora_rank=8"])
        assert both.actor_rollout_ref.model.lora_rank == 8


def test_sizes_of_verls_eight_processes_are_refused_with_the_key_that_it_sets_itself(folder: Path) -> None:
    argv = [*PPO, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"]
    unset = r"trainer\.n_gpus_per_node is not set; verl's default is 8"
    with pytest.raises(ConfigError, match=rf"wrong:\n  - {unset}\n  - .* the 1 rollout processes cannot hold"):
        load_config(argv)
    for more in ("trainer.n_gpus_per_node=1", "trainer.n_gpus_per_node=2"):
        with pytest.raises(ConfigError) as refused:
            load_config([*argv, more])
        assert "is not set" not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        load_config([*PPO, "data.truncation=error", "actor_rollout_ref.rollout.n=0"])
    assert "is not set" not in str(refused.value)


VERLS_FILE = """
actor_rollout_ref:
  actor:
    use_remove_padding: ${oc.select:actor_rollout_ref.model.use_remove_padding,false}
    ulysses_sequence_parallel_size: 2
    fsdp_config: {ulysses_sequence_parallel_size: 1}
  ref:
    ulysses_sequence_parallel_size: ${oc.select:actor_rollout_ref.actor.ulysses_sequence_parallel_size,1}
    fsdp_config: {ulysses_sequence_parallel_size: 1, use_torch_compile: true}
    use_torch_compile: ${oc.select:actor_rollout_ref.actor.use_torch_compile,true}
  model: {path: model, use_remove_padding: true, lora_rank: %d, lora_alpha: 16, lora: {rank: %d, alpha: 32}}
  rollout:
    prompt_length: ${oc.select:data.max_prompt_length,512}
    multi_turn: {tool_config_path: null}
critic:
  forward_micro_batch_size: ${oc.select:.ppo_micro_batch_size,null}
  forward_micro_batch_size_per_gpu: ${oc.select:.ppo_micro_batch_size_per_gpu,null}
data:
  train_files: rows.parquet
  val_files: rows.parquet
  max_prompt_length: 700
  tool_config_path: ${oc.select:actor_rollout_ref.rollout.multi_turn.tool_config_path, null}
distillation:
  teacher_models:
    teacher_model: {_target_: verl.Teacher, key: null, model_path: null, inference: {_target_: verl.Rollout, n: 1}}
trainer: {n_gpus_per_node: 2}
"""
"""What verl writes of a run, .hydra/config.yaml: settings by all their names, with those that follow others."""


@pytest.mark.parametrize(("ranks", "lora"), [((0, 0), (0, 16)), ((64, 0), (64, 16)), ((0, 8), (8, 32))])
def test_a_file_with_all_settings_of_a_run_of_verl_is_a_preset(
    folder: Path, ranks: tuple[int, int], lora: tuple[int, int]
) -> None:
    (folder / "config.yaml").write_text(VERLS_FILE % ranks)
    run = ["--config-name", "./config.yaml"]
    cfg = load_config(run)
    policy = cfg.actor_rollout_ref
    assert policy.actor.ulysses_sequence_parallel_size == 2
    assert policy.ref.ulysses_sequence_parallel_size == 1
    assert (policy.model.lora_rank, policy.model.lora_alpha) == lora
    assert (cfg.data.max_prompt_length, policy.rollout.multi_turn.tool_config_path) == (700, None)
    assert cfg.critic.forward_micro_batch_size_per_gpu is None
    assert load_config([*run, "actor_rollout_ref.model.lora_rank=0"]).actor_rollout_ref.model.lora_rank == 0
    (folder / "config.yaml").write_text(VERLS_FILE % (4, 8))
    with pytest.raises(ConfigError, match=r"lora_rank = 4 and .*lora\.rank = 8 .*two names of one setting"):
        load_config(run)


@pytest.mark.parametrize("where", ["command line", "file"])
def test_no_setting_beside_or_in_a_file_is_lost_to_another_name_of_it(folder: Path, where: str) -> None:
    mine = "defaults: [ppo_trainer]\nactor_rollout_ref: {model: {path: model, lora_rank: 8}}\n"
    (folder / "mine.yaml").write_text(f"{mine}data: {{max_prompt_length: 700}}\n")
    follows = "${oc.select:data.max_prompt_length,64}"
    files = ["data.train_files=rows.parquet", "data.val_files=rows.parquet"]
    policy = f"{{model: {{lora: {{rank: 0}}}}, rollout: {{response_length: '{follows}'}}}}"
    (folder / "child.yaml").write_text(f"defaults: [mine]\nactor_rollout_ref: {policy}\n")
    off = ["actor_rollout_ref.model.lora={rank: 0}", f"actor_rollout_ref.rollout.response_length={follows}"]
    beside = ["--config-name=./mine.yaml", *off] if where == "command line" else ["--config-name=./child.yaml"]
    cfg = load_config([*beside, *files])
    assert (cfg.actor_rollout_ref.model.lora_rank, cfg.data.max_response_length) == (0, 700)


def test_an_older_name_in_verls_file_that_is_our_default_is_not_lost_to_verls_default(folder: Path) -> None:
    """verl takes the older one, which is null unless it was set."""
    text = "reward_model: {n_gpus_per_node: %s}\nreward: {reward_model: {n_gpus_per_node: 8}}\n"
    (folder / "config.yaml").write_text(VERLS_FILE % (0, 0) + text % "null")
    assert load_config(["--config-name=./config.yaml"]).reward.reward_model.n_gpus_per_node == 8
    (folder / "config.yaml").write_text(VERLS_FILE % (0, 0) + text % 1)
    with pytest.raises(ConfigError, match=r"reward_model\.n_gpus_per_node = 1 and .* = 8 .*two names of one setting"):
        load_config(["--config-name=./config.yaml"])
    compiled = "actor: {use_torch_compile: %s, fsdp_config: {use_torch_compile: true}}"
    for value, is_refused in (("true", False), ("false", True)):
        (folder / "mine.yaml").write_text(f"actor_rollout_ref: {{model: {{path: model}}, {compiled % value}}}\n")
        with pytest.raises(ConfigError, match="two names of one") if is_refused else nullcontext():
            load_config([*PPO, "--config-name=./mine.yaml"])


def test_sequence_sizes_of_verls_engine_sections_are_those_of_the_roles(folder: Path) -> None:
    size = "ulysses_sequence_parallel_size"
    argv = [*PPO, "trainer.n_gpus_per_node=4", f"critic.fsdp.{size}=2", f"actor_rollout_ref.ref.fsdp_config.{size}=4"]
    cfg = load_config([*argv, "actor_rollout_ref.actor.use_kl_loss=true"])
    assert (cfg.critic.ulysses_sequence_parallel_size, cfg.actor_rollout_ref.ref.ulysses_sequence_parallel_size) == (
        2,
        4,
    )
    with pytest.raises(ConfigError, match="two names of one setting"):
        load_config([*argv, f"actor_rollout_ref.ref.{size}=1"])


def test_the_tokenizer_of_a_reward_model_that_is_off_is_noted(folder: Path) -> None:
    argv = [*PPO, "reward_model.model.input_tokenizer=${actor_rollout_ref.model.path}"]
    (note,) = (note for note in load(parse_arguments(argv), PPOConfig).notes if "input_tokenizer" in note)
    assert note == (
        "ignored: reward.reward_model.input_tokenizer (the reward model is off; set reward.reward_model.enable=true)"
    )


def test_the_fp8_recipe_of_megatrons_optimizer_is_noted(folder: Path) -> None:
    key = "actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe"
    (note,) = (note for note in load(parse_arguments([*PPO, f"+{key}=blockwise"]), PPOConfig).notes if "fp8" in note)
    assert note == f"ignored: {key} (set megatron.override_transformer_config.fp8_recipe)"


def test_columns_and_conversations_of_older_sft_commands_are_read(folder: Path) -> None:
    argv = ["engine=fsdp", "engine.strategy=fsdp2", "model.partial_pretrain=model", "data.train_files=rows.parquet"]
    dicts = ["data.prompt_key=extra_info", "data.prompt_dict_keys=['question']", "+data.response_dict_keys=['answer']"]
    data = load_config([*argv, *dicts, "data.response_key=extra_info"], SFTConfig).data
    assert (data.prompt_key, data.prompt_dict_keys, data.response_dict_keys) == (
        "extra_info",
        ("question",),
        ("answer",),
    )
    turns = ["data.multiturn.enable=true", "data.multiturn.messages_key=chat", "data.max_length=16384"]
    data = load_config([*argv, *turns], SFTConfig).data
    assert (data.messages_key, data.max_token_len_per_gpu) == ("chat", 16384)


def test_generation_of_verl_is_an_evaluation_that_keeps_the_answers(folder: Path) -> None:
    argv = "data.path=rows.parquet data.n_samples=8 data.batch_size=64 data.output_path=out.parquet model.path=model"
    more = "rollout.temperature=0.6 rollout.top_p=0.95 rollout.prompt_length=1024 rollout.response_length=2048"
    cfg = load_config([*argv.split(), *more.split(), "+model.trust_remote_code=True"], EvalConfig)
    val, data = cfg.actor_rollout_ref.rollout.val_kwargs, cfg.data
    assert (val.n, val.temperature, val.top_p, val.do_sample) == (8, 0.6, 0.95, True)
    assert (data.val_batch_size, data.max_prompt_length, data.max_response_length) == (64, 1024, 2048)
    assert (data.val_files, cfg.trainer.output_path) == (("rows.parquet",), "out.parquet")
    greedy = load_config([*argv.split(), "rollout.temperature=0"], EvalConfig).actor_rollout_ref.rollout.val_kwargs
    assert not greedy.do_sample
