"""The memory line of a job's plan: hand-checked figures of a 7B model, and what it costs to print."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.config import PPOConfig, SFTConfig, load_config
from rlsys.planning import advice
from rlsys.planning.advice import facts_of, memory_line, time_facts
from rlsys.planning.footprint import decoder_of
from rlsys.utils.gpus import GPUS
from scripts.model_shapes import SHAPES
from trainer.job import checked_config

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
LLAMA_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
N = 2 * 32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096
NORMS = (2 * 32 + 1) * 4096
TP8 = (N - NORMS) // 8 + NORMS
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.strategy=megatron"
OVER, SETS = "over pipeline_model_parallel_size=", "set override_transformer_config.num_layers_in"


def line(folder: Path, *settings: str, shape: dict[str, Any] = LLAMA_7B) -> str:
    (folder / "config.json").write_text(json.dumps(shape))
    given = ["data.train_files=null", "data.val_files=null", f"actor_rollout_ref.model.path={folder}"]
    eight = ["trainer.n_gpus_per_node=8", "trainer.device=cuda", f"{ROLLOUT}.name=vllm", *settings]
    cfg = load_config(["--config-name=quickstart", *given, *eight])
    return memory_line(cfg, facts_of(cfg, "cuda", 0))


def figures(text: str) -> dict[str, float]:
    """GiB to start, to generate and in the other stages."""
    parts = text.partition("GiB on a GPU: ")[2].split(", ")
    return dict(zip(("start", "generate", "other"), (float(part.split()[0]) for part in parts), strict=True))


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 1)


def test_a_7b_model_on_eight_ranks_by_hand(tmp_path: Path) -> None:
    assert N == 6_738_415_616
    fsdp = line(tmp_path)
    assert fsdp.startswith("6738.4M parameters; GiB on a GPU: ")
    assert "to generate" in fsdp
    assert "vllm's cache" in fsdp
    sharded, whole = (4 + 8) * N / 8, 2 * N  # float32 weights and moments on 8 ranks; the rollout's bfloat16 copy
    assert figures(fsdp)["start"] == figures(fsdp)["generate"] == gib(sharded + whole) == 22.0
    offloaded = line(tmp_path, f"{ACTOR}.fsdp_config.optimizer_offload=true")
    assert figures(offloaded)["start"] == figures(offloaded)["generate"] == gib(4 * N / 8 + whole) == 15.7
    megatron = line(tmp_path, f"{ACTOR}.megatron.tensor_model_parallel_size=8", MEGATRON)
    assert figures(megatron)["generate"] == gib((2 + 4 + 4 + 8) * TP8 + whole) == 26.7
    away = ("param_offload", "grad_offload", "optimizer_offload")
    parked = line(
        tmp_path,
        f"{ACTOR}.megatron.tensor_model_parallel_size=8",
        *(f"{ACTOR}.megatron.{part}=true" for part in away),
        MEGATRON,
    )
    assert figures(parked)["generate"] == gib(whole) == 12.6
    assert figures(parked)["start"] == gib((2 + 4 + 4 + 8) * TP8) == 14.1, "the actor leaves before the engine starts"


def test_what_learning_the_engine_takes_beyond_the_reserve_counts_at_the_start(tmp_path: Path) -> None:
    """Seven copies of the largest tensor, six of them divided among the engine's ranks; 3 GiB are reserved."""
    wide = LLAMA_7B | {"vocab_size": 262144}
    for tp, copies in ((1, 7), (2, 4)):
        of = figures(line(tmp_path, f"{ROLLOUT}.tensor_model_parallel_size={tp}", shape=wide))
        assert of["start"] - of["generate"] == pytest.approx(copies * 2 * 262144 * 4096 / GIB - 3, abs=0.11)


def test_a_disk_without_room_for_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, only = 60, f"{ACTOR}.checkpoint.save_contents=[model]"
    monkeypatch.setattr(
        advice, "disk_usage", lambda folder: SimpleNamespace(free=free * GIB) if folder.exists() else None
    )
    text = "; a checkpoint needs {:.2f} GiB and the disk of trainer.default_local_dir has {:.2f}"
    assert line(tmp_path).endswith(text.format(12 * N / GIB, 60))  # float32 weights and moments of eight ranks
    assert "checkpoint" not in line(tmp_path, only)
    free = 20
    assert line(tmp_path, only).endswith(text.format(4 * N / GIB, 20))
    too_long = f"trainer.default_local_dir={tmp_path}/{'b/' * 2500}x"  # for the operating system
    assert line(tmp_path, only, too_long).endswith(text.format(4 * N / GIB, 20))


@pytest.mark.parametrize(
    "settings",
    [
        (),
        (f"{ACTOR}.fsdp_config.fsdp_size=8",),
        (MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=8"),
        (MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=4"),
    ],
)
def test_a_checkpoint_of_several_nodes_is_one_model_with_its_moments(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes write into one folder, and what several ranks hold is written once."""
    monkeypatch.setattr(advice, "disk_usage", lambda folder: SimpleNamespace(free=0))
    needs = line(tmp_path, "trainer.nnodes=4", *settings).partition("a checkpoint needs ")[2]
    assert float(needs.split()[0]) == pytest.approx(12 * N / GIB, rel=1e-3)


def test_a_checkpoint_of_actor_and_critic_is_two_models_with_their_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "disk_usage", lambda folder: SimpleNamespace(free=0))
    both = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", f"critic.model.path={tmp_path}")
    needs = line(tmp_path, "trainer.nnodes=4", *both).partition("a checkpoint needs ")[2]
    assert float(needs.split()[0]) == pytest.approx(12 * (2 * N - 32000 * 4096) / GIB, rel=1e-3)


def test_the_rollouts_dtype_and_tensor_parallelism_count(tmp_path: Path) -> None:
    sharded = 12 * N / 8
    wide = line(tmp_path, f"{ROLLOUT}.dtype=float32")
    assert figures(wide)["generate"] == gib(sharded + 4 * N)
    cut = line(tmp_path, f"{ROLLOUT}.tensor_model_parallel_size=4")
    assert figures(cut)["generate"] == gib(sharded + 2 * N / 4)


def test_an_engine_that_keeps_its_memory_is_there_in_training(tmp_path: Path) -> None:
    kept = figures(line(tmp_path, f"{ROLLOUT}.free_cache_engine=false"))
    separate = figures(line(tmp_path, "trainer.rollout_workers=8"))
    assert kept["other"] == pytest.approx(separate["other"] + 2 * N / GIB, abs=0.11)


def test_experts_count_and_rollout_devices_have_their_own_figure(tmp_path: Path) -> None:
    shape = SHAPES["30B-A3B"]
    text = line(tmp_path, "trainer.rollout_workers=8", MEGATRON, shape=shape)
    assert text.startswith(f"{decoder_of(shape).parameters / 1e6:.1f}M parameters")
    assert f"{2 * decoder_of(shape).parameters / GIB:.1f} + vllm's cache to generate (on a rollout device)" in text


def test_an_unplannable_model_is_reported_and_a_missing_one_leaves_the_line_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = LLAMA_7B | {"architectures": ["Unheard"], "model_type": "unheard"}
    assert line(tmp_path, shape=odd).startswith("cannot be planned: ")
    assert line(tmp_path, shape={"architectures": ["LlamaForCausalLM"]}).startswith("cannot be planned: ")
    cfg = load_config(["--config-name=quickstart"])
    assert memory_line(cfg, replace(facts_of(cfg, "cpu", 0), actor={})) == ""
    h100 = facts_of(cfg, "cuda", 80 * GIB)
    assert time_facts(cfg, replace(h100, actor=odd), GPUS["H100"])["time"].startswith("cannot be planned: ")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 256)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    settings = [f"data.train_files={tmp_path}/rows.jsonl", f"model.path={tmp_path}"]
    with pytest.raises(SystemExit):
        checked_config(["--dry-run", "--gpu=H100", *settings], SFTConfig)
    assert "--gpu plans PPO jobs whose model's config.json is here" in capsys.readouterr().err


@pytest.mark.parametrize("device", [[], ["--gpu=H200"]])
def test_the_start_model_has_a_line_and_is_not_compiled(device: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        checked_config(["--dry-run", "--config-name=quickstart", *device], PPOConfig)
    printed = capsys.readouterr().out
    assert "  memory     0.9M parameters; GiB on a " in printed
    assert "  sizes " not in printed


def test_a_plan_beyond_the_device_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    given = [
        f"actor_rollout_ref.model.path={tmp_path}",
        f"{ROLLOUT}.gpu_memory_utilization=0.9",
        f"{ROLLOUT}.name=vllm",
    ]
    cfg = load_config(["--config-name=quickstart", "data.train_files=null", *given, "trainer.n_gpus_per_node=8"])
    for gib, over in (80, True), (400, False):
        assert (
            memory_line(cfg, facts_of(cfg, "cuda", gib * GIB)).endswith(f": more than its {gib}.0, see docs/oom.md")
            is over
        )


@pytest.mark.parametrize(("device", "kind"), [("auto", "GPU, where the cluster has them"), ("cuda", "GPU")])
def test_a_cluster_that_may_have_no_gpus_is_not_taken_to_have_them(tmp_path: Path, device: str, kind: str) -> None:
    """A job that is submitted from a machine without GPUs, which knows no more than trainer.device."""
    assert f"GiB on a {kind}: " in line(tmp_path, f"trainer.device={device}")


def test_the_tables_of_the_guide_need_no_torch() -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    argv = ["scripts/plan.py", "--job", "docs/scaling_job.yaml", "--model", "7B", "--gpu", "H100", "--gpus", "64"]
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "FSDP64; rollout TP4 x DP16" in done.stdout, done.stderr


def test_a_dry_run_plans_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    code = (
        "import contextlib, sys, trainer.main_ppo as job\n"
        "for own in (['trainer.device=cpu'], ['--gpu=H100', *sys.argv.pop().split()]):\n"
        "    with contextlib.suppress(SystemExit): job.main([*sys.argv[1:], *own])\n"
        "print('torch' in sys.modules)"
    )
    model = f"actor_rollout_ref.model.path={tmp_path}"
    rows = ("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=512", f"{ROLLOUT}.n=4")
    many = f"trainer.nnodes=64 trainer.n_gpus_per_node=8 {ROLLOUT}.name=vllm"
    argv = ["--dry-run", "--config-name=quickstart", model, "data.train_files=null", *rows, many]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "  memory     6738.4M parameters; GiB on a CPU process: " in done.stdout
    assert "  memory     6738.4M parameters; GiB on a GPU: " in done.stdout
    assert re.search(r"  time       [\d.]+ s a step at full length: rollout [\d.]+, update_actor ", done.stdout)
    assert re.search(r"  layouts    [\d.]+ s, \d+ GiB: .*; rollout TP\d+ x DP\d+\n {13}[\d.]+ s, ", done.stdout)
    assert done.stdout.splitlines()[-1] == "False"


GATED_DELTA = {
    "model_type": "qwen3_next",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def dry_run(folder: Path, shape: dict[str, Any], *settings: str) -> int | str | None:
    (folder / "config.json").write_text(json.dumps(shape))
    model = f"actor_rollout_ref.model.path={folder}"
    argv = ["--dry-run", "--config-name=quickstart", model, "data.train_files=null", *settings]
    with pytest.raises(SystemExit) as left:
        checked_config(argv, PPOConfig)
    return left.value.code


@pytest.mark.parametrize(
    ("shape", "stages", "says"),
    [
        ({"model_type": "falcon"}, 1, "Megatron and the planner have no table for falcon"),
        (
            {"num_hidden_layers": 61},
            8,
            f"61 layers do not split evenly {OVER}8 and 1 virtual chunks: {SETS}_last_pipeline_stage=5\n",
        ),
        (
            {"num_hidden_layers": 17},
            8,
            f"17 layers do not split evenly {OVER}8 and 1 virtual chunks: {SETS}_last_pipeline_stage, or",
        ),
    ],
)
def test_a_dry_run_refuses_what_the_start_refuses(
    shape: dict[str, Any], stages: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("trainer.n_gpus_per_node=8", "--gpu=H100", MEGATRON)
    cut = f"{ACTOR}.megatron.pipeline_model_parallel_size={stages}"
    assert dry_run(tmp_path, LLAMA_7B | shape, *sizes, cut) == 2
    assert f"rlsys: {ACTOR}.megatron: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({}, MEGATRON),
        (GATED_DELTA, MEGATRON),
        ({}, "actor_rollout_ref.model.lora_rank=8"),
        ({}, "trainer.logger=[console,wandb]"),
    ],
)
def test_a_plan_for_another_machine_needs_no_packages_of_this_one(
    shape: dict[str, Any],
    settings: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("megatron", "peft", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    rows = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64", f"{ROLLOUT}.n=8")
    many = ("trainer.nnodes=8", "trainer.n_gpus_per_node=8", *rows, settings)
    assert dry_run(tmp_path, LLAMA_7B | shape, *many, "--gpu=H100") == 0, capsys.readouterr().err
    assert " s a step at full length" in capsys.readouterr().out
    assert dry_run(tmp_path, LLAMA_7B | shape, *many) == 2
    assert "is not installed; pip install -e" in capsys.readouterr().err


def test_a_dry_run_that_refuses_a_layout_proposes_those_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of one copy are 121 GiB, of a GPU's 79.6; the settings of the first give its seconds and bytes."""
    rows = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64", f"{ROLLOUT}.n=8")
    sizes = ("trainer.n_gpus_per_node=8", "trainer.nnodes=8", "--gpu=H100", *rows)
    assert dry_run(tmp_path, LLAMA_7B | {"num_hidden_layers": 320, "head_dim": 128}, *sizes) == 2
    first, *layouts, settings = capsys.readouterr().err.splitlines()
    assert "vllm beside what trains does not fit" in first
    assert first.endswith("; layouts that fit:")
    assert len(layouts) == 3
    assert "rollout TP" in layouts[0]
    given = settings.removeprefix("  settings of the first: ").split()
    assert dry_run(tmp_path, LLAMA_7B | {"num_hidden_layers": 320, "head_dim": 128}, *sizes, *given) == 0
    assert f" {layouts[0].split()[0]} s a step at full length" in (printed := capsys.readouterr().out)
    assert f"{layouts[0].strip()}\n" in printed
