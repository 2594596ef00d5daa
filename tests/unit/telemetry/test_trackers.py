"""Metrics land in the JSONL file and in the trackers, through resumes, crashes and failing trackers."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.telemetry.jsonl import JsonlWriter, read_jsonl
from rlsys.telemetry.trackers import BestEffort, TrackedRun, Tracking
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]


def open_tracking(directory: Path, *loggers: str, resume_step: int | None = None, **config: Any) -> closing[Tracking]:
    run = TrackedRun("proj", "exp", config, directory, resume_step)
    return closing(Tracking(run, loggers=loggers, best_effort=BestEffort()))


def test_every_line_is_strict_json_also_with_odd_values(tmp_path: Path) -> None:
    with open_tracking(tmp_path, "file") as tracking:
        tracking.log({"a": 1.5, "nan": math.nan, "inf": -math.inf, "np": np.float32(2), "t": torch.tensor(3)}, 1)
        tracking.log({"text": "\ud800 lone", "list": [1.0, math.nan], "b": True}, 2)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert lines[0] == {
        "step": 1,
        "a": 1.5,
        "nan": None,
        "inf": None,
        "np": 2.0,
        "t": 3,
        "_non_finite": {"nan": "nan", "inf": "-inf"},
    }
    assert lines[1] == {"step": 2, "text": "\ud800 lone", "list": [1.0, "nan"], "b": True}


def test_reading_restores_non_finite_numbers(tmp_path: Path) -> None:
    with open_tracking(tmp_path) as tracking:
        tracking.log({"x": math.nan, "y": math.inf, "z": 0.25}, 1)
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert math.isnan(record["x"])
    assert record["y"] == math.inf
    assert record["z"] == 0.25


@pytest.mark.parametrize("resume_at", [0, 2, 3, 5])
@pytest.mark.parametrize("torn", [b"", b'{"step": 9, "los', b'{"step": 1}garbage\n'])
def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path, resume_at: int, torn: bytes) -> None:
    def run(directory: Path, first: int, last: int, resume_step: int | None) -> None:
        with open_tracking(directory, resume_step=resume_step) as tracking:
            for step in range(first, last + 1):
                tracking.log({"loss": 1 / (1 + step)}, step)

    run(tmp_path / "whole", 0, 6, None)
    run(tmp_path / "cut", 0, 5, None)
    with (tmp_path / "cut" / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    run(tmp_path / "cut", resume_at + 1, 6, resume_at)
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_starting_over_keeps_the_old_file(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        with open_tracking(tmp_path) as tracking:
            tracking.log({"run": value}, 1)
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    assert [next(read_jsonl(tmp_path / name))["run"] for name in names] == [1, 2, 3]


def test_kill_9_leaves_whole_lines(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from rlsys.telemetry.trackers import BestEffort
from rlsys.telemetry.jsonl import JsonlWriter
writer = JsonlWriter(Path({str(tmp_path / "m.jsonl")!r}))
step = 0
while True:
    writer.write({{"step": step, "x": "y" * 2000}})
    if step == 50: print("go", flush=True)
    step += 1
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=scaled_s(10))
    records = list(read_jsonl(str(tmp_path / "m.jsonl")))
    assert [r["step"] for r in records] == list(range(len(records)))
    assert len(records) > 50
    JsonlWriter(tmp_path / "m.jsonl", resume_step=10).close()
    assert [r["step"] for r in read_jsonl(tmp_path / "m.jsonl")] == list(range(11))


def test_full_disk_is_an_error_and_the_torn_line_is_removed(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import resource, signal
from pathlib import Path
from rlsys.telemetry.trackers import BestEffort
from rlsys.telemetry.jsonl import JsonlWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JsonlWriter(Path({str(tmp_path / "m.jsonl")!r}))
writer.write({{"step": 1, "x": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
try:
    writer.write({{"step": 2, "x": "y" * 100}})
except OSError as error:
    print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled_s(60), check=True
    )
    assert done.stdout == "OSError\n"
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "x": 1}\n'


def test_console_prints_a_table_and_no_kl_that_is_always_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_tracking(tmp_path, "console") as tracking:
        tracking.log({"critic/score/mean": 0.0, "actor/ppo_kl": 0.0, "perf/throughput": 12345.6, "zzz": 1}, 3)
        tracking.log({"val-core/openai/gsm8k/acc/mean@1": 0.25, "critic/score/mean": 0.5, "perf/throughput": 99.0}, 4)
        tracking.log({"critic/score/mean": 0.25, "actor/ppo_kl": 1e-4}, 5)
        tracking.log({"critic/score/mean": 0.125, "actor/ppo_kl": 0.0, "perf/throughput": 1.0}, 6)
        tracking.log({"val-core/openai/gsm8k/acc/mean@1": 0.25}, 7)
        tracking.log({"other": 1.0, "bad": math.nan}, 8)
    assert capsys.readouterr().out.splitlines() == [
        "    step    reward     tok/s",
        "       3     0.000    12,346",
        "       4     0.500        99",
        "    step    reward    ppo_kl     tok/s",
        "       5     0.250  1.00e-04          ",
        "       6     0.125  0.00e+00         1",
        "step 8: other 1",
    ]


def test_console_repeats_the_names_of_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_tracking(tmp_path, "console") as tracking:
        for step in range(1, 52):
            tracking.log({"critic/score/mean": 1.0}, step)
    lines = capsys.readouterr().out.splitlines()
    assert [at for at, line in enumerate(lines) if "reward" in line] == [0, 26, 52]


def test_an_unknown_tracker_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger='tensorbord' did not start"):
        open_tracking(tmp_path, "file", "tensorbord")


def test_tensorboard_receives_scalars_and_a_resume_purges_the_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with open_tracking(tmp_path, "tensorboard", lr=0.5) as tracking:
        for step in range(4):
            tracking.log({"actor/lr": float(step), "bad": math.nan}, step)
        tracking.log_generations([("question", "answer", 1.0)], 3)
    with open_tracking(tmp_path, "tensorboard", resume_step=1) as tracking:
        tracking.log({"actor/lr": 20.0}, 2)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/lr")] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_wandb_resumes_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_tracking(tmp_path, "wandb") as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log_generations([("q", "a", 1.0)], 1)
        assert tracking.best_effort.num_errors == 0
    first = (tmp_path / ".wandb_run_id").read_text()
    with open_tracking(tmp_path, "wandb", resume_step=1) as tracking:
        tracking.log({"x": 2.0}, 2)
    assert (tmp_path / ".wandb_run_id").read_text() == first


def test_mlflow_resumes_the_same_run_and_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    with open_tracking(tmp_path, "mlflow", actor={"lr": 0.5}, api_key="hidden") as tracking:
        tracking.log({"val-core/gsm8k/acc/mean@1": 1.0}, 1)
    with open_tracking(tmp_path, "mlflow", resume_step=1) as tracking:
        tracking.log({"x": 2.0}, 2)
    assert tracking.best_effort.num_errors == 0
    assert "SystemMetricsMonitor" not in [thread.name for thread in threading.enumerate()], "it ends with the run"
    (run,) = mlflow.search_runs(experiment_names=["proj"], output_format="list")
    own = {name: value for name, value in run.data.metrics.items() if not name.startswith("system/")}
    assert (run.info.status, own) == ("FINISHED", {"val-core/gsm8k/acc/mean_at_1": 1.0, "x": 2.0})
    assert run.data.params == {"actor.lr": "0.5", "api_key": "[redacted]"}


def test_trackio_takes_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with open_tracking(tmp_path, "trackio") as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log_generations([("q", "a", 1.0)], 1)
        assert tracking.best_effort.num_errors == 0


class _Failing:
    def __init__(self, run: object) -> None:
        pass

    def log(self, data: object, step: int) -> None:
        raise ConnectionError("gone")

    def log_generations(self, rows: object, step: int) -> None:
        raise ConnectionError("gone")

    def close(self) -> None:
        raise ConnectionError("gone")


def test_the_report_of_a_failed_recorder_has_one_line_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError(
            "actor rank 0 failed: FileNotFoundError: no such folder\n  File 'workers/base.py', line 30\n"
        )

    BestEffort()("profile", fail)
    BestEffort()("rollouts", lambda: (tmp_path / "gone" / "1.jsonl").write_text(""))
    message, of_file = caplog.messages
    assert message.endswith("FileNotFoundError: no such folder")
    assert str(tmp_path / "gone" / "1.jsonl") in of_file


def test_a_failing_tracker_is_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlsys.telemetry.trackers.ADAPTERS", {"console": _Failing})
    with open_tracking(tmp_path, "console") as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log({"x": 2.0}, 2)
    assert tracking.best_effort.num_errors == 3
    assert [r.message for r in caplog.records] == [
        "tracker console failed, its record is incomplete: ConnectionError: gone"
    ]
    assert list(read_jsonl(tmp_path / "metrics.jsonl")) == [
        {"step": 1, "x": 1.0},
        {"step": 2, "x": 2.0, "training/tracker_errors": 1},
    ]


def test_a_tracker_that_does_not_start_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: object) -> None:
        raise PermissionError("no account")

    monkeypatch.setattr("rlsys.telemetry.trackers.ADAPTERS", {"console": refuse})
    with pytest.raises(ConfigError, match=r"trainer\.logger='console' did not start: PermissionError: no account"):
        open_tracking(tmp_path, "console")


class _Posting(_Failing):
    """Posts to a server that takes connections and never answers; the first calls need none."""

    def __init__(self, run: object) -> None:
        self.calls = [lambda: None, self._post]

    def _post(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}", data=b"{}")

    def log(self, data: object, step: int) -> None:
        self.calls.pop(0)()


class _Kept(_Failing):
    """Keeps what it is working on as libraries do, in a variable of its context."""

    steps: ContextVar[list[int]] = ContextVar("steps")

    def __init__(self, run: object) -> None:
        self.steps.set([])

    def log(self, data: object, step: int) -> None:
        self.steps.get().append(step)

    def close(self) -> None:
        assert self.steps.get() == [1, 2, 3]


def test_calls_of_a_tracker_share_its_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.telemetry.trackers.ADAPTERS", {"trackio": _Kept})
    with open_tracking(tmp_path, "trackio") as tracking:
        for step in (1, 2, 3):
            tracking.log({"x": 1.0}, step)
    assert tracking.best_effort.num_errors == 0


def test_the_console_prints_in_the_context_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook knows by its context in which cell a line is shown: those of later cells were shown in none."""
    cell, shown = ContextVar[int]("cell"), list[int]()
    monkeypatch.setattr("builtins.print", lambda *_, **options: shown.append(cell.get()))
    cell.set(1)
    with open_tracking(tmp_path, "console") as tracking:
        for number in (2, 3):
            cell.set(number)
            tracking.log({"x": 1.0}, number)
    assert shown == [2, 3]


def test_a_tracker_that_does_not_answer_is_named_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlsys.telemetry.trackers.ADAPTERS", {"wandb": _Posting})
    with open_tracking(tmp_path, "wandb") as tracking:
        tracking.log({"x": 1.0}, 1)
        monkeypatch.setattr("rlsys.telemetry.trackers.CALL_S", 0.2)
        tracking.log({"x": 2.0}, 2)
        tracking.log({"x": 3.0}, 3)
    assert tracking.best_effort.num_errors == 1
    late = "tracker wandb did not answer within 0.2 s at stage 'log'"
    assert caplog.messages == [
        f"{late}: the run continues without it",
        f"tracker wandb failed, its record is incomplete: DeadlineError: {late}",
    ]
    errors = [record.get("training/tracker_errors") for record in read_jsonl(tmp_path / "metrics.jsonl")]
    assert errors == [None, None, 1]


def test_a_tracker_that_does_not_answer_at_the_start_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlsys.telemetry.trackers.ADAPTERS", {"mlflow": lambda run: threading.Event().wait()})
    monkeypatch.setattr("rlsys.telemetry.trackers.CALL_S", 0.2)
    with pytest.raises(ConfigError, match="did not start: DeadlineError: tracker mlflow did not answer within"):
        open_tracking(tmp_path, "mlflow")
    assert not caplog.messages, "the run does not continue without it"
