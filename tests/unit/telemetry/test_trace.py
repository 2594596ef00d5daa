"""Timelines: spans of threads and processes line up, and the file survives a cut at any byte."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlsys.telemetry.trace import Event, Timeline, Tracer, add_arguments, arrows
from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]


def spans(events: list[Event]) -> dict[str, Event]:
    return {e["name"]: e for e in events if e["ph"] == "X"}


def contains(outer: Event, inner: Event) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_spans_nest_and_carry_wall_clock_time() -> None:
    tracer = Tracer("actor 0")
    before = time.time()
    with tracer.span("step"), tracer.span("update_actor"):
        time.sleep(0.02)
    by_name = spans(tracer.drain())
    assert contains(by_name["step"], by_name["update_actor"])
    seconds = time.time() - before + 0.05
    assert 0.02e6 <= by_name["update_actor"]["dur"] < seconds * 1e6
    assert -0.05 < by_name["step"]["ts"] / 1e6 - before < seconds
    assert tracer.drain() == []


def test_names_of_process_and_threads_are_written_once() -> None:
    tracer = Tracer("rollout 1")

    def work() -> None:
        for name in ("a", "b"):
            with tracer.span(name):
                pass

    thread = threading.Thread(target=work, name="sampler")
    thread.start()
    thread.join()
    events = tracer.drain()
    names = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names[0][0] == "process_name"
    assert names[0][1].startswith("rollout 1 @ ")
    assert names[1:] == [("thread_name", "main"), ("thread_name", "sampler")]
    assert len({e["tid"] for e in events}) == 2
    assert len({e["pid"] for e in events}) == 1


def test_a_failing_stage_is_recorded_with_its_error() -> None:
    tracer = Tracer("x")
    with pytest.raises(KeyError), tracer.span("reward"):
        raise KeyError("k")
    assert spans(tracer.drain())["reward"]["args"] == {"error": "KeyError"}


def test_many_threads_lose_nothing() -> None:
    tracer = Tracer("x")

    def work() -> None:
        for _ in range(200):
            with tracer.span("s"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    drained = []
    while any(t.is_alive() for t in threads):
        drained += tracer.drain()
    drained += tracer.drain()
    assert sum(e["ph"] == "X" for e in drained) == 1600


def _child(connection: Any) -> None:
    tracer = Tracer("worker 1")
    with tracer.span("inside"):
        time.sleep(0.02)
    connection.send(tracer.drain())


def test_events_of_two_processes_line_up(tmp_path: Path) -> None:
    tracer = Tracer("driver")
    here, there = multiprocessing.Pipe()
    with tracer.span("wait"):
        child = multiprocessing.get_context("fork").Process(target=_child, args=(there,))
        child.start()
        events = here.recv()
        child.join(10)
    with closing(Timeline(tmp_path / "timeline.json")) as timeline:
        timeline.add(tracer.drain())
        timeline.add(events)
    merged = json.loads((tmp_path / "timeline.json").read_text())
    by_name = spans(merged)
    assert contains(by_name["wait"], by_name["inside"])
    assert by_name["wait"]["pid"] != by_name["inside"]["pid"]


def test_file_cut_at_any_byte_is_readable_and_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    events = [{"name": f"e{i}", "ph": "X", "ts": i, "dur": 1, "pid": 1, "tid": 1} for i in range(4)]
    with closing(Timeline(path)) as timeline:
        timeline.add(events[:2])
        timeline.add(events[2:])
    whole = path.read_bytes()
    assert json.loads(whole) == events
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        Timeline(path).close()
        kept = json.loads(path.read_bytes())
        assert kept == events[: len(kept)]
        assert len(kept) >= whole[:cut].count(b",\n")
        with closing(Timeline(path)) as timeline:
            timeline.add([{"name": "later"}])
        assert json.loads(path.read_bytes()) == [*kept, {"name": "later"}]


def test_timeline_is_valid_json_from_the_start_and_after_every_call(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with closing(Timeline(path)) as timeline:
        assert json.loads(path.read_bytes()) == []
        timeline.add([], provisional=[{"name": "running 1 s"}, {"name": "also"}])
        assert json.loads(path.read_bytes()) == [{"name": "running 1 s"}, {"name": "also"}]
        timeline.add([{"name": "done"}], provisional=[{"name": "next"}])
        assert json.loads(path.read_bytes()) == [{"name": "done"}, {"name": "next"}]
        timeline.add([{"name": "next, done"}])
        assert json.loads(path.read_bytes()) == [{"name": "done"}, {"name": "next, done"}]


def test_full_disk_loses_the_events_of_one_call_and_leaves_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import resource, signal
from pathlib import Path
from rlsys.telemetry.trace import Timeline
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
timeline = Timeline(Path({str(path)!r}))
timeline.add([{{"name": "before"}}])
resource.setrlimit(resource.RLIMIT_FSIZE, (200, -1))
try:
    timeline.add([{{"name": "lost" * 100}}])
except OSError as error:
    print("refused", error.errno)
print(Path({str(path)!r}).read_text())
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
timeline.add([{{"name": "after"}}])
timeline.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled_s(60), check=True
    )
    first, _, left = done.stdout.partition("\n")
    assert first.startswith("refused")
    assert json.loads(left) == [{"name": "before"}]
    assert json.loads(path.read_bytes()) == [{"name": "before"}, {"name": "after"}]


def _span(pid: int, tid: int, name: str, start: int, end: int) -> Event:
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": end - start}


def test_exchanges_that_follow_each_other_closely_are_one_span_on_the_track_of_their_replica(tmp_path: Path) -> None:
    first = [_span(1, 1, "exchange", at * 25_000, at * 25_000 + 1000) for at in range(10)]
    push, other = _span(1, 1, "receive_weights", 230_000, 240_000), _span(2, 2, "exchange", 0, 1000)
    late = _span(1, 1, "exchange", 900_000, 901_000)
    events = [*first[:9], other, push, first[9], late]
    with closing(Timeline(tmp_path / "t.json")) as timeline:
        timeline.add(events[:3], events[3:])
        timeline.add(events[3:])
    spans = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in json.loads((tmp_path / "t.json").read_text())]
    assert [span for span in spans if span[0] == 1] == [
        (1, "exchange", 0, 51_000),
        (1, "exchange", 75_000, 151_000),
        (1, "receive_weights", 230_000, 10_000),
        (1, "exchange", 900_000, 1000),
    ]
    assert spans.count((2, "exchange", 0, 1000)) == 1


def test_spans_carry_step_and_tokens_of_their_own_batch() -> None:
    step, gen, update = _span(1, 1, "step", 0, 100), _span(1, 1, "gen", 5, 40), _span(1, 1, "update_actor", 50, 90)
    testing, checked = _span(1, 1, "testing", 110, 150), _span(1, 1, "gen", 115, 140)
    ahead, worker = _span(1, 2, "gen", 50, 120), _span(7, 3, "update_actor", 55, 85)
    events = [step, gen, update, testing, checked, ahead, worker, {"name": "process_name", "ph": "M", "pid": 1}]
    add_arguments(events, 1, 4, {"gen": 300, "update_actor": 500})
    assert [gen["args"], update["args"]] == [{"step": 4, "tokens": 300}, {"step": 4, "tokens": 500}]
    assert [step["args"], testing["args"], checked["args"], worker["args"]] == [{"step": 4}] * 4
    assert "args" not in ahead


def test_arrows_lead_from_the_stage_to_the_calls_of_workers_inside_it() -> None:
    update = _span(1, 1, "update_actor", 50, 90)
    ahead = _span(1, 2, "gen", 40, 95)
    events = [_span(1, 1, "step", 0, 100), update, ahead, _span(7, 3, "update_actor", 55, 85)]
    events += [_span(8, 4, "exchange", 70, 80), _span(8, 4, "exchange", 60, 70), _span(9, 5, "stray", 85, 93)]
    flows = arrows(events, 1)
    starts, ends = [e for e in flows if e["ph"] == "s"], [e for e in flows if e["ph"] == "f"]
    assert [(e["pid"], e["tid"], e["ts"]) for e in starts] == [(1, 1, 50), (1, 2, 40)]
    assert [(e["pid"], e["tid"], e["ts"], e["bp"]) for e in ends] == [(7, 3, 55, "e"), (8, 4, 60, "e")]
    assert [e["id"] for e in starts] == [e["id"] for e in ends]
    assert len({e["id"] for e in starts}) == 2


def test_counters_are_points_of_curves(tmp_path: Path) -> None:
    tracer = Tracer("x")
    tracer.counter("memory (GiB)", {"host": 1.23456789})
    (event,) = [e for e in tracer.drain() if e["ph"] == "C"]
    assert (event["name"], event["args"], event["pid"]) == ("memory (GiB)", {"host": 1.23457}, tracer.pid)


def test_empty_timeline_is_valid(tmp_path: Path) -> None:
    Timeline(tmp_path / "t.json").close()
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_odd_arguments_stay_valid_json(tmp_path: Path) -> None:
    odd = {"nan": float("nan"), "path": tmp_path, "ok": 1.5, "nested": {1: None}}
    with closing(Timeline(tmp_path / "t.json")) as timeline:
        timeline.add([{"name": "s", "args": odd}])
    (event,) = json.loads((tmp_path / "t.json").read_text())
    assert event["args"] == {"nan": "nan", "path": str(tmp_path), "ok": 1.5, "nested": {"1": None}}


def test_kill_9_while_writing(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from rlsys.telemetry.trace import Timeline, Tracer
tracer, timeline = Tracer("victim"), Timeline(Path({str(path)!r}))
for i in range(10**9):
    with tracer.span(f"s{{i}}"):
        pass
    timeline.add([*tracer.drain(), {{"name": "x" * 3000, "ph": "i"}}])
    if i == 20: print("go", flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=scaled_s(10))
    repaired = path.read_bytes().removesuffix(b"\n]\n").rstrip(b",\n")
    Timeline(path).close()
    events = json.loads(path.read_bytes())
    names = [e["name"] for e in events if e["ph"] == "X"]
    assert names == [f"s{i}" for i in range(len(names))]
    assert len(names) > 20
    if not repaired.endswith(b"}"):
        repaired = repaired[: repaired.rindex(b",\n")]
    assert len(json.loads(repaired + b"]")) == len(events)


def test_a_process_that_is_interrupted_as_it_starts_has_the_same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_ns = iter([5_000_000, 0, 2_000_000])
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: 9_000_000 - next(lost_ns, 1_000))
        patch.setattr(time, "perf_counter_ns", lambda: 0)
        tracer = Tracer("actor 0")
        with tracer.span("step"):
            pass
    assert spans(tracer.drain())["step"]["ts"] == 9_000
