"""A run continues when nothing about it can be written any more."""

import io
import json
import math
import resource
import signal
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlsys.config.schema.trainer import TrainingConfig
from rlsys.telemetry.jsonl import read_jsonl
from rlsys.telemetry.log import setup_logging
from rlsys.telemetry.recorder import StageRecorder
from rlsys.utils.errors import OptimizerError
from tests import trace_format
from tests.ranks import run_ranks
from trainer.reporting import Reporter


@dataclass(frozen=True)
class Printed:
    """What a process wrote to its streams."""

    stdout: str
    stderr: str


def report(folder: Path, limits: Mapping[int, int]) -> Printed:
    """Six steps; from a step in `limits` on no file may grow beyond so many bytes."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        setup_logging()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        reporter = Reporter(TrainingConfig(default_local_dir=str(folder)), {}, num_devices=1)
        worker = StageRecorder("actor 0")
        reporter.start(0, 6)
        for step in range(1, 7):
            if step in limits:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limits[step], -1))
            with reporter.stage("step"), reporter.stage("update_actor"), worker.stage("update_actor"):
                pass
            reporter.add({"critic/score/mean": step / 10})
            reporter.add_stages(worker.drain())
            print("errors", reporter.finish_step(step).get("training/tracker_errors", 0))
        reporter.generations([("question", "answer", 1.0)], 6)
        reporter.close()
        reporter.close()
        print("complete")
    return Printed(out.getvalue(), err.getvalue())


def run(folder: Path, limits: Mapping[int, int] | None = None) -> Printed:
    """What `report` does in a process of its own."""
    (printed,) = run_ranks(1, report, folder, limits or {})
    return printed


def test_a_full_disk_costs_records_and_never_the_run(tmp_path: Path) -> None:
    """From step 3 on no file may grow beyond a byte, from step 5 on the disk has room again."""
    done = run(tmp_path, {3: 1, 5: -1})
    assert done.stdout.rstrip().endswith("complete")
    for name in ("timeline.json", "memory.txt", "metrics.jsonl"):
        assert done.stderr.count(f"{name} failed, its record is incomplete") == 1
    assert "Traceback" not in done.stderr
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [r["step"] for r in records] == [1, 2, 5, 6]
    assert "training/tracker_errors" not in records[1]
    assert records[-1]["training/tracker_errors"] >= 6
    events = json.loads((tmp_path / "timeline.json").read_bytes())
    assert [e["args"]["step"] for e in events if e["name"] == "step"] == [1, 2, 5, 6]
    assert "update_actor" in (tmp_path / "memory.txt").read_text()
    assert '"steps":[1,2,5,6]' in (tmp_path / "index.html").read_text()


def test_a_step_without_an_update_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(TrainingConfig(default_local_dir=str(tmp_path)), {}, num_devices=1)
    reporter.start(0, 2)
    for step, skipped in ((1, 0.0), (2, 1.0)):
        with reporter.stage("step"):
            reporter.add({"actor/skipped_steps": skipped, "critic/skipped_steps": 0.0})
        reporter.finish_step(step)
    reporter.close()
    (warning,) = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert warning == "step 2: skipped optimizer steps, no tokens or not finite: actor/skipped_steps=1"


@pytest.mark.parametrize(("first", "total", "last"), [(0, 50, 11), (0, 3, None), (47, 50, 50)])
def test_steps_without_an_update_in_a_row_end_the_run(tmp_path: Path, first: int, total: int, last: int | None) -> None:
    """Ten in a row, or all of a start that has fewer; the first step of a run of 3 updates the model."""
    reporter = Reporter(TrainingConfig(default_local_dir=str(tmp_path)), {}, num_devices=1)
    reporter.start(first, total)
    why = rf"in {(last or 0) - max(first, 1)} steps \(actor/grad_norm\): gradients were not finite"
    for step in range(first + 1, (last or total) + 1):
        norm = 1.0 if step == 1 else math.nan
        reporter.add({"actor/grad_norm": norm, "actor/skipped_steps": float(step > 1), "critic/grad_norm": 1.0})
        with pytest.raises(OptimizerError, match=why) if step == last else nullcontext():
            reporter.finish_step(step)
    reporter.close()
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(first + 1, (last or total) + 1))


def test_files_that_refuse_from_the_start_cost_records_and_never_the_run(tmp_path: Path) -> None:
    for name in ("timeline.json", "memory.txt", "index.html"):
        (tmp_path / name).mkdir()
    done = run(tmp_path)
    assert done.stdout.rstrip().endswith("complete")
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert done.stderr.count("failed, its record is incomplete") == 2


def test_timeline_has_steps_speed_memory_and_arrows(tmp_path: Path) -> None:
    run(tmp_path)
    events = json.loads((tmp_path / "timeline.json").read_bytes())
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"memory (GiB)", "tokens/s per device"}
    assert [sum(e["ph"] == kind for e in events) for kind in "sf"] == [6, 6]
    updates = [e["args"] for e in events if e["name"] == "update_actor" and e["ph"] == "X"]
    assert [args["step"] for args in updates] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert sum("tokens" in args for args in updates) == 6
    assert trace_format.problems(events) == []
