"""Timeline of every stage on every worker, in the Chrome trace format that ui.perfetto.dev opens.

Each process records with a `Tracer` and sends its events to the driver (`drain`), which writes them all into one file
with a `Timeline`. Times are wall-clock microseconds read from the monotonic clock, so several processes line up.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlsys.telemetry.jsonl import plain_json

Event = dict[str, Any]
_PID_MASK = 0x7FFFFFFF


class Tracer:
    """Records spans of this process; thread-safe, a few microseconds per span, bounded memory.

    `process_name` names the track (e.g. "actor 0"): it is the same for later attempts of a run, and roles that share a
    process have one each. Beyond `max_events` undrained events new ones are counted and left out.
    """

    def __init__(self, process_name: str, *, thread_name: str = "main", max_events: int = 100_000) -> None:
        track = f"{process_name} @ {socket.gethostname()}"
        self._pid = zlib.crc32(track.encode()) & _PID_MASK
        self._epoch_ns = _epoch_offset_ns()
        self._events: list[Event] = []
        self._num_dropped = 0
        self._max_events = max_events
        self._lock = threading.Lock()
        self._named_threads = {threading.get_native_id()}
        self._name("process_name", track, threading.get_native_id())
        self._name("thread_name", thread_name, threading.get_native_id())

    @contextmanager
    def span(self, name: str, args: Mapping[str, Any] | None = None) -> Generator[None]:
        """Surround a stage; `args` (numbers and strings) are shown on click. A stage that raises names its error."""
        event: Event = {"name": name, "ph": "X", "ts": self._now_us(), **({"args": dict(args)} if args else {})}
        try:
            yield
        except BaseException as error:
            event.setdefault("args", {})["error"] = type(error).__name__
            raise
        finally:
            event["dur"] = self._now_us() - event["ts"]
            self._add(event)

    def drain(self) -> list[Event]:
        """The events since the last call, ready to be sent to the driver."""
        with self._lock:
            events, self._events = self._events, []
            dropped, self._num_dropped = self._num_dropped, 0
        if dropped:
            where = {"pid": self._pid, "tid": threading.get_native_id(), "ts": self._now_us()}
            events.append({"name": f"{dropped} events dropped", "ph": "i", "s": "p", "args": {}, **where})
        return events

    def _now_us(self) -> int:
        return (time.perf_counter_ns() + self._epoch_ns) // 1000

    def _add(self, event: Event) -> None:
        tid = threading.get_native_id()
        with self._lock:
            if len(self._events) >= self._max_events:
                self._num_dropped += 1
                return
            event["pid"], event["tid"] = self._pid, tid
            if tid not in self._named_threads:
                self._named_threads.add(tid)
                self._name("thread_name", threading.current_thread().name, tid)
            self._events.append(event)

    def _name(self, what: str, name: str, tid: int) -> None:
        self._events.append({"name": what, "ph": "M", "pid": self._pid, "tid": tid, "args": {"name": name}})


class Timeline:
    """One trace file growing by whole events; a crash at any moment leaves a file that Perfetto opens.

    The file is a JSON array with one event per line; only `close` writes the bracket at its end, which the format lets
    be missing. Opening an existing file continues it (resume), so one file shows all attempts of a run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _whole_lines(path.read_bytes()) if path.exists() else []
        beside = path.with_name(path.name + ".tmp")
        beside.write_bytes(b"[\n" + b",\n".join(kept))
        beside.replace(path)
        self.path = path
        self._first = not kept
        self._file = path.open("ab")

    def add(self, events: Iterable[Event]) -> None:
        """Append events and flush them to the operating system."""
        for event in events:
            line = json.dumps(plain_json(event), allow_nan=False).encode()
            self._file.write(line if self._first else b",\n" + line)
            self._first = False
        self._file.flush()

    def close(self) -> None:
        """Finish the array; safe to call twice."""
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_timeline(path: Path) -> list[Event]:
    """The events of a timeline, whether it was closed or cut off anywhere."""
    return [json.loads(line) for line in _whole_lines(path.read_bytes())]


def _whole_lines(content: bytes) -> list[bytes]:
    """The repair rule: drop the brackets, the commas at line ends and a last line that is not valid JSON."""
    lines = [line.rstrip(b",") for line in content.splitlines()]
    lines = [line for line in lines if line not in (b"", b"[", b"]")]
    try:
        json.loads(lines[-1] if lines else b"{}")
    except ValueError:
        del lines[-1]
    return lines


def _epoch_offset_ns() -> int:
    """What to add to the monotonic clock to get wall-clock time; the tightest of a few readings."""
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) // 2
