"""A run continues when nothing about it can be written any more."""

import json
import subprocess
import sys
from pathlib import Path

from rlsys.telemetry.jsonl import read_jsonl
from tests import trace_format
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import resource, signal
from rlsys.config.schema.trainer import TrainingConfig
from rlsys.telemetry.log import setup_logging
from rlsys.telemetry.recorder import StageRecorder
from trainer.reporting import Reporter
setup_logging()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
reporter = Reporter(TrainingConfig(default_local_dir=sys.argv[1]), {{}}, num_devices=1)
worker = StageRecorder("actor 0")
limits = {{int(part.split(":")[0]): int(part.split(":")[1]) for part in sys.argv[2:]}}
reporter.start(0, 6)
for step in range(1, 7):
    if step in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[step], -1))
    with reporter.stage("step"), reporter.stage("update_actor"), worker.stage("update_actor"):
        pass
    reporter.add({{"critic/score/mean": step / 10}})
    reporter.add_stages(worker.drain())
    print("errors", reporter.finish_step(step).get("training/tracker_errors", 0))
reporter.generations([("question", "answer", 1.0)], 6)
reporter.close()
reporter.close()
print("complete")
"""


def run(folder: Path, *limits: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), *limits],
        capture_output=True,
        text=True,
        timeout=scaled_s(60),
        check=True,
    )


def test_a_full_disk_costs_records_and_never_the_run(tmp_path: Path) -> None:
    """From step 3 on no file may grow beyond a byte, from step 5 on the disk has room again."""
    done = run(tmp_path, "3:1", "5:-1")
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
