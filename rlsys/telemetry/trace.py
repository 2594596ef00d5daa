"""Timeline of every stage on every worker, in the Chrome trace format that ui.perfetto.dev opens.

Each process records with a `Tracer` and sends its events to the driver (`drain`), which writes them all into one file
with a `Timeline`. Times are wall-clock microseconds read from the monotonic clock, so several processes line up.
"""

import json
import socket
import threading
import time
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rlsys.telemetry.jsonl import plain_json
from rlsys.utils.atomic import write_whole

Event = dict[str, Any]
_PID_MASK = 0x7FFFFFFF
_OPEN, _CLOSE = b"[\n", b"\n]\n"
JOINED, JOIN_WITHIN_US = ("exchange",), 250_000
"""Calls that follow one another many times a second: those that are this close are one span."""


class Tracer:
    """Records spans of this process; thread-safe, a few microseconds per span.

    `process_name` names the track (e.g. "actor 0"): it is the same for later attempts of a run, and roles that share a
    process have one each.
    """

    def __init__(self, process_name: str) -> None:
        track = f"{process_name} @ {socket.gethostname()}"
        self.pid = zlib.crc32(track.encode()) & _PID_MASK
        # a process that is interrupted between the two readings gets less
        self._epoch_ns = max(time.time_ns() - time.perf_counter_ns() for _ in range(8))
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._named_threads = {threading.get_native_id()}
        self._name("process_name", track, threading.get_native_id())
        self._name("thread_name", "main", threading.get_native_id())

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Surround a stage; one that raises names its error."""
        event: Event = {"name": name, "ph": "X", "ts": self._now_us()}
        try:
            yield
        except BaseException as error:
            event["args"] = {"error": type(error).__name__}
            raise
        finally:
            event["dur"] = self._now_us() - event["ts"]
            self._add(event)

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        """Add a point to the curves of `name`, a track below the spans of this process."""
        rounded = {key: float(f"{value:.6g}") for key, value in values.items()}
        self._add({"name": name, "ph": "C", "ts": self._now_us(), "args": rounded})

    def drain(self) -> list[Event]:
        """The events since the last call, ready to be sent to the driver."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def _now_us(self) -> int:
        return (time.perf_counter_ns() + self._epoch_ns) // 1000

    def _add(self, event: Event) -> None:
        tid = threading.get_native_id()
        with self._lock:
            event["pid"], event["tid"] = self.pid, tid
            if tid not in self._named_threads:
                self._named_threads.add(tid)
                self._name("thread_name", threading.current_thread().name, tid)
            self._events.append(event)

    def _name(self, what: str, name: str, tid: int) -> None:
        self._events.append({"name": what, "ph": "M", "pid": self.pid, "tid": tid, "args": {"name": name}})


class Timeline:
    """One trace file growing by whole events, valid JSON at every moment but that of a write.

    The file is a JSON array with one event per line. Opening an existing file continues it (resume), so one file shows
    all attempts of a run; a line cut off by a crash is left out. OSError where the disk refuses: the events of that
    call are lost and the file stays as it was.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _OPEN + b",\n".join(_whole_lines(path.read_bytes()) if path.exists() else [])
        write_whole(path, kept + _CLOSE)
        self.path = path
        self._end = len(kept)
        self._file = path.open("r+b", buffering=0)

    def add(self, events: Iterable[Event], provisional: Iterable[Event] = ()) -> None:
        """Append events; the next call replaces those that are `provisional`."""
        kept = self._joined(events, self._end)
        end = self._end + len(kept)
        try:
            self._put(kept + self._joined(provisional, end) + _CLOSE)
        except OSError:
            with suppress(OSError):
                self._put(_CLOSE)
            raise
        self._end = end

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()

    def _joined(self, events: Iterable[Event], at: int) -> bytes:
        lines = [json.dumps(plain_json(event), allow_nan=False).encode() for event in joined(events)]
        return (b",\n" if lines and at > len(_OPEN) else b"") + b",\n".join(lines)

    def _put(self, content: bytes) -> None:
        self._file.seek(self._end)
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]
        self._file.truncate()


def joined(events: Iterable[Event]) -> list[Event]:
    """The events by time; calls of JOINED with nothing else on their track between them, and close, as one span."""
    kept, last = list[Event](), dict[tuple[int, int], Event]()
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        track = event.get("pid", 0), event.get("tid", 0)
        before = last.get(track)
        if event.get("ph") != "X":
            kept.append(event)
        elif (
            before is not None
            and before["name"] == event["name"] in JOINED
            and event["ts"] - before["ts"] - before["dur"] < JOIN_WITHIN_US
        ):
            before["dur"] = event["ts"] + event["dur"] - before["ts"]
        else:
            last[track] = dict(event)
            kept.append(last[track])
    return kept


def add_arguments(events: Iterable[Event], controller: int, step: int, tokens: Mapping[str, int]) -> None:
    """Note the step in each span of workers and of the controller's main thread, and in its stages their tokens.

    `tokens` are those of the step by stage. What the controller does in other threads belongs to another step, and a
    stage inside "testing" to no step's batch.
    """
    spans = [event for event in events if event["ph"] == "X"]
    own = [span for span in spans if span["pid"] == controller]
    main = {span["tid"] for span in own if span["name"] == "step"}
    testing = [span for span in own if span["name"] == "testing"]
    for span in spans:
        if span["pid"] == controller and span["tid"] not in main:
            continue
        args = span.setdefault("args", {})
        args["step"] = step
        if span["pid"] == controller and span["name"] in tokens and not any(_covers(test, span) for test in testing):
            args["tokens"] = tokens[span["name"]]


def arrows(events: Iterable[Event], controller: int) -> list[Event]:
    """Flow events from each of the controller's stages to the first call of a method on every worker inside it.

    Their ids are hexadecimal: Perfetto drops others.
    """
    spans = [event for event in events if event["ph"] == "X"]
    stages = [span for span in spans if span["pid"] == controller and span["name"] not in ("step", "source")]
    flows: dict[tuple[object, ...], tuple[Event, Event]] = {}
    for call in sorted(spans, key=lambda span: span["ts"]):
        generates = call["name"].startswith(("generate", "exchange"))
        around = [s for s in stages if (s["name"] == "gen") == generates and _covers(s, call)]
        if call["pid"] == controller or not around:
            continue
        stage = min(around, key=lambda span: span["dur"])
        flow = blake2b(f"{call['pid']}.{call['tid']}.{call['ts']}".encode(), digest_size=7).hexdigest()
        shared = {"name": stage["name"], "cat": "call", "id": flow}
        start = {**shared, "ph": "s", "ts": stage["ts"], "pid": stage["pid"], "tid": stage["tid"]}
        end = {**shared, "ph": "f", "bp": "e", "ts": call["ts"], "pid": call["pid"], "tid": call["tid"]}
        flows.setdefault((stage["tid"], stage["ts"], call["pid"], call["name"]), (start, end))
    return [event for pair in flows.values() for event in pair]


def _covers(outer: Event, inner: Event) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def _whole_lines(content: bytes) -> list[bytes]:
    """The repair rule: drop the brackets, the commas at line ends and a last line that is not valid JSON."""
    lines = [line.rstrip(b",") for line in content.splitlines()]
    lines = [line for line in lines if line not in (b"", b"[", b"]")]
    try:
        json.loads(lines[-1] if lines else b"{}")
    except ValueError:
        del lines[-1]
    return lines
