"""The main job, whole, in this process: what it leaves behind and that it can be taken up again."""

import gzip
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlsys.rollout.hf.engine import HFRollout
from tests import trace_format
from tests.e2e.conftest import Toy
from tests.e2e.fork_server import ForkServer, Patches
from tests.e2e.ray_head import Head
from trainer.main_ppo import main

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LOCAL = "trainer.backend=local"
CORRUPTED = "model.layers.1.mlp.up_proj.weight"
WALL_CLOCK = ("timing", "perf/", "weights/seconds", "reward/seconds", "checkpoint/failed_uploads")


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """The metric lines without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(WALL_CLOCK)} for line in lines]


def spans_by_track(out: Path) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """(start, end) of every span of a timeline in microseconds, by track and name."""
    events = json.loads((out / "timeline.json").read_text())
    assert trace_format.problems(events) == []
    tracks = {e["pid"]: e["args"]["name"].split(" @ ")[0] for e in events if e["name"] == "process_name"}
    spans: dict[str, dict[str, list[tuple[int, int]]]] = {name: {} for name in tracks.values()}
    for e in events:
        if e["ph"] == "X":
            spans[tracks[e["pid"]]].setdefault(e["name"], []).append((e["ts"], e["ts"] + e["dur"]))
    return spans


def files_of(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "train.log"}


def weights_of(out: Path, step: int) -> dict[str, Any]:
    return load_file(str(out / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.safetensors"))


def test_a_run_leaves_metrics_checkpoint_timeline_and_rollouts(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    rollouts = f"trainer.rollout_data_dir={out}/rollouts"
    assert main(toy.overrides(out, LOCAL, rollouts, "trainer.test_freq=2", "trainer.profile_steps=[2]")) == 0
    (trace,) = (out / "profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = {event["name"] for event in events}
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert trace.name == "step2_actor_rank0.json.gz"
    assert {"gen", "compute_log_prob", "update_actor", "reshard_weights"} <= ranges
    assert {"aten::mm", "aten::embedding", "Optimizer.step#AdamW.step"} <= kernels
    printed, log = capsys.readouterr().out, (out / "train.log").read_text()
    assert {"config.yaml", "starts.jsonl"} <= {path.name for path in out.iterdir()}
    for line in printed[printed.index("rlsys: done in") :].splitlines():
        assert line in log
    assert f"  checkpoint  {out}/global_step_3\n" in printed
    assert "    step    reward" in log
    lines = metrics_of(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"} <= set(lines[0])
    assert {f"data/{name}" for name in ("rows", "bad_rows", "overlong_prompts", "truncated_prompts")} <= set(lines[0])
    assert any(name.startswith("val-core/text/exact/") for name in lines[1])
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (out / "rollouts" / "index.html").exists()
    assert len((out / "rollouts" / "1.jsonl").read_text().splitlines()) == 32
    stages = spans_by_track(out)
    assert {"gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights"} <= stages["controller"].keys()
    assert {"init_model", "compute_log_prob", "update_actor", "save_checkpoint"} <= stages["actor 0"].keys()
    assert {"init_model", "exchange"} <= stages["rollout 0"].keys()
    outer, inner = stages["controller"]["update_actor"], stages["actor 0"]["update_actor"]
    assert len(outer) == len(inner) == 3
    for (start, end), (first, last) in zip(outer, inner):
        assert start <= first <= last <= end
    assert len(stages["controller"]["save_checkpoint"]) == 1
    ledger = (out / "memory.txt").read_text().splitlines()
    assert any(line.startswith("actor 0     update_actor") for line in ledger), ledger
    whole = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert whole["perf/memory/compute_log_prob/rss_peak_gb"] > 0
    assert 0 < whole["perf/mfu/actor"] < 1
    assert 0 < whole["perf/mfu/actor_infer"] < 1


def test_a_run_whose_workers_do_not_see_its_folder_ends_before_it_trains(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, here = Path.exists, iter([True])  # the controller sees the log, the worker, asked next, does not
    monkeypatch.setattr(Path, "exists", lambda path: next(here, False) if path.name == "train.log" else exists(path))
    assert main(toy.overrides(tmp_path / "out", LOCAL)) == 2
    assert f"trainer.default_local_dir={tmp_path}/out: actor rank 0 does not see it" in capsys.readouterr().err


def test_processes_that_only_generate_have_profiles_too(
    toy: Toy, server: ForkServer, head: Head, tmp_path: Path
) -> None:
    out, ran = tmp_path / "out", {}
    argv = toy.overrides(
        out, "trainer.rollout_workers=1", "trainer.total_training_steps=1", "trainer.profile_steps=[1]"
    )
    ended = server.run(argv, tmp_path / "log", Patches(), env=head.env, deadline_s=300)
    assert ended.status == 0, ended.log
    for trace in (out / "profile").iterdir():
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        ran[trace.name] = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert ran.keys() == {"step1_actor_rank0.json.gz", "step1_rollout_rank0.json.gz"}
    assert "update_actor" in ran["step1_actor_rank0.json.gz"]
    assert "exchange" in ran["step1_rollout_rank0.json.gz"]


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(toy: Toy, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(toy.overrides(whole, LOCAL, "trainer.save_freq=1")) == 0
    copies = f"trainer.default_hdfs_dir=memory://bucket/{tmp_path.name}"
    assert main(toy.overrides(parts, LOCAL, copies, "trainer.save_freq=1", "trainer.total_training_steps=2")) == 0
    assert main(toy.overrides(tmp_path / "second", LOCAL, copies, "trainer.save_freq=1")) == 0
    assert main(toy.overrides(parts, LOCAL, "trainer.save_freq=1")) == 0
    theirs = weights_of(whole, 3)
    for ours in (weights_of(parts, 3), weights_of(tmp_path / "second", 3)):
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert metrics_of(parts) == metrics_of(whole)
    assert metrics_of(tmp_path / "second") == metrics_of(whole)[2:]


def weight_checks(*more: str) -> tuple[str, ...]:
    return (LOCAL, "actor_rollout_ref.rollout.validate_weight=true", *more)


def reports_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The reports of compared weights by version."""
    reports = [json.loads(path.read_text()) for path in folder.glob("weights_v*.json")]
    return {report["version"]: report for report in reports}


@pytest.mark.parametrize("engine", ["local", "shm"])
def test_every_push_is_compared_tensor_by_tensor(toy: Toy, tmp_path: Path, engine: str) -> None:
    checks = weight_checks(
        f"actor_rollout_ref.rollout.validate_save_dir={tmp_path}/checks",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={engine}",
    )
    assert main(toy.overrides(tmp_path / "out", *checks, "trainer.total_training_steps=2")) == 0
    reports = reports_of(tmp_path / "checks")
    assert sorted(reports) == [0, 1, 2]
    assert all(report["equal"] and len(report["tensors"]) == 26 for report in reports.values())
    assert len({report["checksum"] for report in reports.values()}) == 3


def test_a_rollout_tensor_that_differs_ends_the_run_and_is_named(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    finish = HFRollout.finish_update

    def corrupted(engine: HFRollout, version: int) -> None:
        if version == 2:
            engine.local_tensors()[CORRUPTED][3, 5] += 1e-6
        finish(engine, version)

    monkeypatch.setattr(HFRollout, "finish_update", corrupted)
    checks = weight_checks(f"actor_rollout_ref.rollout.validate_save_dir={tmp_path}/checks")
    assert main(toy.overrides(tmp_path / "out", *checks)) == 1
    printed = capfd.readouterr().err
    assert f"1 tensors differ between trainer and rollout: ['{CORRUPTED}']" in printed
    reports = reports_of(tmp_path / "checks")
    assert {version: report["unequal"] for version, report in reports.items()} == {0: [], 1: [], 2: [CORRUPTED]}
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [1]


def test_weights_are_pushed_every_n_steps_and_before_validation(toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "out"
    often = (
        "trainer.sync_freq=3",
        "trainer.max_staleness=2",
        "trainer.total_training_steps=6",
        "trainer.test_freq=5",
        "trainer.save_freq=-1",
    )
    assert main(toy.overrides(out, LOCAL, *often)) == 0
    lines = metrics_of(out)
    assert [line.get("weights/version") for line in lines[1:]] == [None, 3, None, 5, 6]
    assert [line["training/staleness"] for line in lines] == [0, 1, 2, 0, 1, 0]


def test_a_run_that_is_done_says_so_and_changes_only_its_log(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = toy.overrides(out, LOCAL, "trainer.total_training_steps=1")
    assert main(argv) == 0
    assert "rlsys: done in" in capsys.readouterr().out
    before = files_of(out)
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "This run is already complete (step 1 of 1)." in printed
    assert "To train further: raise trainer.total_training_steps" in printed
    assert "To start over: trainer.resume_mode=disable" in printed
    assert f"{out}/metrics.jsonl" in printed
    assert "done in" not in printed
    assert files_of(out) == before
    assert "This run is already complete" in (out / "train.log").read_text()
    failing = [*argv, "trainer.total_training_steps=2", "data.seed=7"]
    assert main(failing) == 2
    assert files_of(out) == before, "a start that fails leaves config.yaml, starts.jsonl and all else of the run"
    assert main([*argv, "trainer.total_training_steps=2"]) == 0
    assert [line["step"] for line in metrics_of(out)] == [1, 2]


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"),
        ("algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"),
        ("algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token"),
        ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true"),
    ],
    ids=["ppo with critic and reference", "remax with adaptive kl", "bypass with importance weights", "lora"],
)
def test_other_algorithms_run_through_the_same_loop(toy: Toy, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    assert main(toy.overrides(out, LOCAL, "trainer.total_training_steps=1", *overrides)) == 0
    (line,) = metrics_of(out)
    assert line["actor/skipped_steps"] == 0
    (whole,) = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert ("perf/mfu/critic" in whole) == ("critic/vf_loss" in whole)


def test_a_script_with_the_names_of_areal_trains(toy: Toy, tmp_path: Path) -> None:
    config = runpy.run_path(str(SCRIPTS / "gsm8k_grpo.py"))["CONFIG"]
    data = (f"train_dataset.path={toy.train}", f"eval_dataset.path={toy.val}", "data.max_prompt_length=16")
    sizes = ("rollout.batch_size=4", "rollout.max_tokens=4", "total_train_steps=1", "reward.num_workers=1")
    more = (LOCAL, "trainer.val_before_train=false", f"trainer.default_local_dir={tmp_path}")
    assert main([*config.arguments(), f"actor.path={toy.model}", *data, *sizes, *more]) == 0
    (line,) = metrics_of(tmp_path)
    assert (line["rollout/answered"], line["actor/lr"]) == (16, 1e-6)
