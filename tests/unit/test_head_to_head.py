"""The bench beside verl and TRL, without a GPU: its commands, and its reading of what the systems write."""

import ast
import json
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from rlsys.config import PPOConfig, load_config
from scripts.bench import head_to_head
from scripts.bench.head_to_head import kernel_phases, kernel_table, read_steps, table

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ("rlsys-vllm", "rlsys-auto-vllm", "verl", "trl", "trl-sleep")


def commands(out: Path, *arguments: str) -> dict[str, list[str]]:
    bench = [sys.executable, "scripts/bench/head_to_head.py", "--dry-run", "--out", str(out), *arguments]
    done = subprocess.run(bench, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name: shlex.split(words) for name, _, words in (line.partition(": ") for line in done.stdout.splitlines())}


def test_every_system_gets_the_same_job_under_its_own_names(tmp_path: Path) -> None:
    of = commands(tmp_path, "--steps", "7", "--new", "64", "--prompts", "16", "--natural", "--python", "verl=/v/python")
    assert tuple(of) == SYSTEMS
    assert not list(tmp_path.iterdir())
    assert of["verl"][:3] == ["/v/python", "-m", "verl.trainer.main_ppo"]
    shared = {word for word in of["rlsys-vllm"] if "=" in word} & set(of["verl"])
    policy = "actor_rollout_ref"
    for setting in ("trainer.total_training_steps=7", "data.max_response_length=64", "data.train_batch_size=16"):
        assert setting in shared
    assert {f"{policy}.rollout.n=8", f"{policy}.rollout.ignore_eos=False"} <= shared
    assert {f"{policy}.rollout.free_cache_engine=False", f"{policy}.actor.strategy=fsdp2"} <= set(of["verl"])
    assert not [word for word in of["rlsys-auto-vllm"] if "max_token_len" in word]
    job, *given = of["trl"][1:]
    paths = [str(tmp_path / name) for name in ("job", "0.5B", "trl")]
    assert given == [*paths, "7", "64", "16", "--memory", "0.5", "--natural"]
    assert of["trl-sleep"][-2:] == ["--sleep", "--natural"]
    assert {f"{policy}.rollout.gpu_memory_utilization=0.5"} <= set(of["rlsys-vllm"]) & set(of["verl"])
    options = {node.value for node in ast.walk(ast.parse(Path(job).read_text())) if isinstance(node, ast.Constant)}
    assert {
        "job",
        "model",
        "out",
        "steps",
        "new",
        "prompts",
        "--memory",
        "--sleep",
        "--natural",
        "--profile",
    } <= options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "rlsys-hf", "trainer.seed=1"), "--systems: trainer.seed=1: choose from rlsys-ENGINE"),
        (("--systems", "foo"), "--systems: foo: choose from"),
        (("--steps", "3"), "--steps 3 --skip 3: no step is counted; set --steps 4 or more"),
        (("--repeats", "0"), "--repeats: must be at least 1"),
        (("--model", "mistyped"), "--model: mistyped: no folder with a config.json"),
        (("--python", "verl=/missing"), "--python: verl: set verl=PATH"),
        (("--alone", "--natural"), "--alone: the engine alone draws answers of one length; remove --natural"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    bench = [sys.executable, str(ROOT / "scripts/bench/head_to_head.py"), "--out", "out", *arguments]
    done = subprocess.run(bench, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert message in done.stderr


def test_each_engine_is_measured_alone_once_and_set_beside_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    rates = {"plain": 2048.0, "with_logprobs": 1024.0}
    monkeypatch.setattr(head_to_head, "offline", lambda engine, *_: asked.append(engine) or rates)
    monkeypatch.setattr(head_to_head, "roofline", lambda *_: 4096.0)
    monkeypatch.setattr(head_to_head, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(head_to_head, "read_rate", lambda _: 1e9)
    runs = [("rlsys-vllm", 1.0), ("rlsys-auto-vllm", 2.0), ("rlsys-hf", 1.0), ("trl", 1.0)]
    results = [{"system": system, "steps": [{"gen": seconds}]} for system, seconds in runs]
    args = SimpleNamespace(prompts=16, new=16, model=Path("model"), deadline_s=1.0)
    lines = list(head_to_head.alone_lines(results, args))
    assert asked == ["vllm"]
    assert [line.rpartition(" ")[2] for line in lines] == ["0.50", "1.00", "0.25", "1.00", "2.00", "0.50"]
    assert lines[0] == "rlsys-auto-vllm: 1,024 tokens/s in the job; vllm alone, plain: 2,048; job / alone 0.50"


def test_all_systems_take_a_model_with_its_own_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    of = commands(tmp_path, "--model", str(model), "--memory", "0.3", "--systems", "rlsys-vllm", "verl", "trl-ids")
    for system in ("rlsys-vllm", "verl"):
        assert f"actor_rollout_ref.model.path={model}" in of[system]
        assert "actor_rollout_ref.rollout.gpu_memory_utilization=0.3" in of[system]
    assert of["trl-ids"][3] == str(model)
    assert of["trl-ids"][-3:] == ["--memory", "0.3", "--ids"]


def test_a_profile_is_of_one_more_step_of_rlsys_and_trl(tmp_path: Path) -> None:
    of = commands(tmp_path, "--steps", "7", "--python", "verl=/v/python", "--profile")
    assert {"trainer.total_training_steps=8", "global_profiler.steps=[8]"} <= set(of["rlsys-vllm"])
    assert (of["trl"][5], of["trl"][-1]) == ("8", "--profile")
    assert "trainer.total_training_steps=7" in of["verl"]
    assert "global_profiler" not in " ".join(of["verl"])


def test_kernels_are_shown_by_phase(tmp_path: Path) -> None:
    def event(category: str, name: str, start: float, seconds: float) -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "ts": start * 1e6, "dur": seconds * 1e6}

    ranges = [("exchange", 0, 1), ("exchange", 2, 2), ("compute_log_prob", 5, 1), ("reshard_weights", 6, 1)]
    events = [event("user_annotation", *one) for one in ranges]
    events += [event("kernel", "gemm", 0.5, 3), event("kernel", "flash", 5.25, 0.5)]
    trace = tmp_path / "step8_rank0.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    ours = {"system": "rlsys-vllm", "profile": kernel_phases(trace)}
    assert kernel_table([{"system": "verl", "profile": {}}, ours]).splitlines() == [
        "| kernel s / s, idle | rlsys-vllm | verl |",
        "| --- | --- | --- |",
        "| gen | 3.00 / 4.00, 25% | no profile |",
        "| old_log_prob | 0.50 / 1.00, 50% | no profile |",
        "| update_weights | no kernels / 1.00 | no profile |",
    ]


def test_settings_shared_with_verl_are_settings_of_ours(tmp_path: Path) -> None:
    words = commands(tmp_path, "--systems", "rlsys-hf")["rlsys-hf"]
    files = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "reward.custom_reward_function.path")
    settings = [word for word in words if "=" in word and not word.startswith(files)]
    cfg = load_config(settings, PPOConfig)
    assert (cfg.trainer.total_training_steps, cfg.actor_rollout_ref.rollout.n) == (12, 8)


VERL = {"timing_s/gen": 4.0, "timing_s/old_log_prob": 1.0, "timing_s/update_actor": 2.0, "actor/entropy": 0.5}
TRL = {"timing_s/gen": 3.0, "timing_s/old_log_prob": 0.5, "timing_s/update_weights": 0.25, "timing_s/update_actor": 3.0}
TRL |= {"response_length/mean": 200.0}


@pytest.mark.parametrize("system", ["verl", "trl"])
def test_steps_are_read_from_recorded_logs(system: str, tmp_path: Path) -> None:
    record = [{"step": step, "data": VERL} if system == "verl" else TRL for step in range(1, 5)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join(map(json.dumps, record)) + '\n{"step": 5, "da')
    steps = read_steps(log, [10.0, 18.0, 27.0, 35.0], skip=2)
    assert [step["wall"] for step in steps] == [9.0, 8.0]
    phases = (4.0, 1.0, 2.0, 0.0) if system == "verl" else (3.0, 0.5, 3.0, 0.25)
    for step in steps:
        assert tuple(step[p] for p in ("gen", "old_log_prob", "update_actor", "update_weights")) == phases
        assert step["rest"] == step["wall"] - sum(phases)
    assert read_steps(tmp_path / "none.jsonl", [], skip=2) == []


def test_the_table_has_lowest_median_and_highest_of_all_repeats_by_phase(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join(map(json.dumps, [TRL] * 4)) + "\n")
    runs = [
        {"system": "trl", "steps": read_steps(log, times, skip=1), "first_s": times[:1], "peak_gib": peak}
        for times, peak in (([10.0, 18.0, 27.0, 35.0], 80.0), ([12.0, 19.0, 29.0, 40.0], 82.0))
    ]
    failed = {"system": "verl", "steps": [], "first_s": [], "peak_gib": 1.0}
    lines = table([*runs, failed]).splitlines()
    assert lines[0] == "| seconds | trl |"
    assert "| wall | 7.00 / 8.50 / 11.00 |" in lines
    assert "| update_actor | 3.00 / 3.00 / 3.00 |" in lines
    assert lines[-3:] == ["| tokens of an answer, mean | 200 |", "| first_s | 11 |", "| peak_gib | 81.0 |"]
    ours = {**runs[0], "system": "rlsys-vllm", "steps": [{**step, "wall": 4.25} for step in runs[0]["steps"]]}
    lines = table([*runs, failed, ours]).splitlines()
    assert lines[0] == "| seconds | rlsys-vllm | trl |"
    assert "| wall | 4.25 / 4.25 / 4.25 | 7.00 / 8.50 / 11.00 = 2.00x |" in lines


def test_nothing_waits_for_the_gpu_while_trl_updates_but_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL enters these contexts in each micro-batch; waits there would hold back its update alone."""
    names = ("trl", "trl.extras", "trl.extras.profiling", "datasets")
    for name in names:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    job = runpy.run_path(str(ROOT / "scripts" / "bench" / "trl_job.py"), run_name="trl_job")
    waits = list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("wait"))

    def timed(name: str, *inside: str) -> None:
        context = SimpleNamespace(name=f"GRPOTrainer.{name}")
        job["enter"](context)
        for one in inside:
            timed(one)
        job["leave"](context)

    timed("_prepare_inputs", "vLLM.generate", "_get_per_token_logps_and_entropies")
    assert (len(waits), {"gen", "old_log_prob", "prepare"} <= set(job["spent"])) == (4, True)
    timed("compute_loss", "_get_per_token_logps_and_entropies")
    timed("_prepare_inputs")
    timed("compute_loss", "_get_per_token_logps_and_entropies")
    assert (len(waits), "update_actor" in job["spent"]) == (4, False)
