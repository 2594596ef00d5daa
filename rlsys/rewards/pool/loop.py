"""What happens in the reward pool's own thread: children are started, fed, read, judged late, ended and replaced."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlsys.ipc.framing import FrameBuffer, WireError
from rlsys.rewards.pool.framing import MAX_FRAME_BYTES, decode, encode, plain
from rlsys.rewards.pool.records import Grader, RewardItem, RewardResult, failed
from rlsys.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
CONCURRENT_WINDOW = 64
GRACE_S = 0.3
END_S = 0.8
MAX_FAILED_STARTS = 3
LOST: dict[str, Any] = {"event": "ended", "cause": "was lost with its guard", "tail": ""}


class Batch:
    """Items that were handed in together and the future that answers them all."""

    def __init__(self, num_items: int) -> None:
        self.results: list[RewardResult | None] = [None] * num_items
        self.left = num_items
        self.abandoned = False
        self.future: Future[list[RewardResult]] = Future()
        self.future.set_running_or_notify_cancel()
        if num_items == 0:
            self.future.set_result([])


@dataclass(eq=False)
class Job:
    """One item on its way; `since` is when its grading could begin at the earliest."""

    number: int
    item: RewardItem
    batch: Batch
    index: int
    since: float = 0.0

    def finish(self, result: RewardResult) -> None:
        """Answer this item, once."""
        batch = self.batch
        if batch.results[self.index] is None:
            batch.results[self.index] = result
            batch.left -= 1
            if batch.left == 0 and not batch.future.done():
                batch.future.set_result([r for r in batch.results if r is not None])


@dataclass(eq=False)
class Child:
    """A guard process, the socket to it, and the socket to its grader."""

    process: subprocess.Popen[bytes]
    work: socket.socket
    control: socket.socket
    tmp_dir: str
    since: float
    state: Literal["starting", "ready", "ending"] = "starting"
    concurrent: bool = False
    grader_pid: int = 0
    turn: int = -1
    jobs: dict[int, Job] = field(default_factory=dict)
    unsent: bytearray = field(default_factory=bytearray)
    work_frames: FrameBuffer = field(default_factory=lambda: FrameBuffer(max_bytes=MAX_FRAME_BYTES))
    control_frames: FrameBuffer = field(default_factory=lambda: FrameBuffer(max_bytes=MAX_FRAME_BYTES))
    suspect: Job | None = None
    cause: str = ""

    def culprit(self) -> Job | None:
        """The job whose code is running: the first in line, or the one whose turn was announced last."""
        first = next(iter(self.jobs.values()), None)
        return self.jobs.get(self.turn, first) if self.concurrent else first


class Pump:
    """The state of a running pool. All methods but `hand_in` and `stop` belong to the thread that calls `run`."""

    def __init__(self, grader: Grader, *, num_workers: int, timeout_s: float, start_timeout_s: float) -> None:
        self._grader, self._num_workers = grader, num_workers
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._incoming: deque[Job | Future[None]] = deque()
        self._queue: deque[Job] = deque()
        self._starters: list[Future[None]] = []
        self._children: list[Child] = []
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._stopping = self._usable = False
        self._failed_starts = 0

    def hand_in(self, work: Sequence[Job | Future[None]]) -> None:
        """Take jobs, or futures that want to know when the first child is ready."""
        self._incoming.extend(work)
        self._wake()

    def stop(self) -> None:
        """Make `run` end all children and return."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full means that it is awake, closed that it has ended
            self._wake_write.send(b"w")

    def run(self) -> None:
        """Pump until `stop`."""
        while not self._stopping:
            self._take_incoming()
            if self._queue or self._starters or self._usable:
                self._start_missing()
            self._hand_out()
            for key, events in self._selector.select(self._seconds_to_next_deadline()):
                self._handle(key, events)
            self._check_deadlines()
            self._leaving = [process for process in self._leaving if process.poll() is None]
        self._shut_down()

    def _take_incoming(self) -> None:
        while self._incoming:
            work = self._incoming.popleft()
            if isinstance(work, Job):
                self._queue.append(work)
            else:
                self._starters.append(work)
        if any(c.state == "ready" for c in self._children):
            self._answer_starters(None)

    def _answer_starters(self, error: Exception | None) -> None:
        for starter in self._starters:
            if error:
                starter.set_exception(error)
            else:
                starter.set_result(None)
        self._starters.clear()

    # --- feeding ---

    def _start_missing(self) -> None:
        for _ in range(sum(c.state != "ending" for c in self._children), self._num_workers):
            child = start_child()
            self._children.append(child)
            self._selector.register(child.control, selectors.EVENT_READ, child)
            self._selector.register(child.work, selectors.EVENT_READ, child)
            grader = self._grader
            path = None if grader.path is None else str(Path(grader.path).resolve())
            first = {"path": path, "name": grader.name, "kwargs": plain(grader.kwargs), "timeout_s": self._timeout_s}
            child.unsent += encode(first)
            self._flush(child)

    def _hand_out(self) -> None:
        """Give the jobs in line to the children with the fewest, as far as their windows go."""
        while self._queue:
            free = [c for c in self._children if len(c.jobs) < self._window(c)]
            if not free:
                return
            job = self._queue.popleft()
            if not job.batch.abandoned and not job.batch.future.done():
                self._give(min(free, key=lambda c: len(c.jobs)), job)

    def _window(self, child: Child) -> int:
        if child.state != "ready":
            return 0
        return CONCURRENT_WINDOW if child.concurrent else 1

    def _give(self, child: Child, job: Job) -> None:
        try:
            frame = encode(_message(job))
        except (WireError, ValueError, RecursionError) as error:
            job.finish(failed("error", 0.0, f"the item cannot be handed to a grader: {error}"))
            return
        job.since = time.monotonic()
        child.jobs[job.number] = job
        child.unsent += frame
        self._flush(child)

    def _flush(self, child: Child) -> None:
        try:
            while child.unsent:
                del child.unsent[: child.work.send(child.unsent)]
        except BlockingIOError:
            pass  # the selector says when there is room again
        except OSError:
            child.unsent.clear()  # reading will tell that it has ended
        self._selector.modify(child.work, selectors.EVENT_READ | (selectors.EVENT_WRITE if child.unsent else 0), child)

    # --- reading ---

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        child: Child | None = key.data
        if child is None:
            self._wake_read.recv(4096)
        elif child not in self._children:
            return
        elif key.fileobj is child.control:
            self._read_control(child)
        elif child.state != "ending":
            if events & selectors.EVENT_WRITE:
                self._flush(child)
            if events & selectors.EVENT_READ:
                self._read_work(child)

    def _read_work(self, child: Child) -> None:
        try:
            data = child.work.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._end(child, child.culprit(), "")
            return
        try:
            for parts in child.work_frames.feed(data):
                self._take_message(child, decode(parts))
        except (WireError, KeyError, TypeError, ValueError) as error:
            self._end(child, child.culprit(), f"the grader wrote onto the pool's channel: {error!r}")

    def _take_message(self, child: Child, message: Mapping[str, Any]) -> None:
        event = message.get("event")
        if event == "ready":
            child.state, child.concurrent = "ready", bool(message["concurrent"])
            self._failed_starts, self._usable = 0, True
            self._answer_starters(None)
        elif event == "unusable":
            self._end(child, None, "")
            self._give_up(f"cannot be loaded: {message['message']}")
        elif event == "turn":
            child.turn = int(message["id"])
        else:
            job = child.jobs.pop(int(message["id"]), None)
            following = child.culprit()
            if following is not None and not child.concurrent:
                following.since = time.monotonic()
            if job is not None:
                job.finish(_result(message))

    def _read_control(self, child: Child) -> None:
        try:
            data = child.control.recv(1 << 16)
            messages = [decode(parts) for parts in child.control_frames.feed(data)] if data else [LOST]
        except (OSError, WireError):
            messages = [LOST]
        for message in messages:
            if message["event"] == "started":
                child.grader_pid = int(message["pid"])
                continue
            for _ in range(4):
                if child.state != "ending":
                    self._read_work(child)
            if child.state != "ending":
                self._end(child, child.culprit(), "")
            self._forget(child, f"{message['cause']}{_tail(str(message['tail']))}", guarded=message is not LOST)
            return

    # --- ending ---

    def _end(self, child: Child, suspect: Job | None, cause: str) -> None:
        """Stop talking to a child; `suspect` is answered when its guard has reported, the others go back in line."""
        if child.state == "ending":
            return
        self._failed_starts += child.state == "starting"
        child.state, child.since, child.suspect, child.cause = "ending", time.monotonic(), suspect, cause
        self._selector.unregister(child.work)
        child.work.close()
        with suppress(OSError):
            child.control.shutdown(socket.SHUT_WR)
        if suspect is not None:
            del child.jobs[suspect.number]
        self._queue.extendleft(reversed(child.jobs.values()))
        child.jobs.clear()

    def _forget(self, child: Child, report: str, *, guarded: bool) -> None:
        """The child has ended. If its guard did not say so, all that is known of it is killed."""
        self._selector.unregister(child.control)
        child.control.close()
        self._children.remove(child)
        if not guarded:
            _kill_group(child.grader_pid)
            child.process.kill()
        self._leaving.append(child.process)
        shutil.rmtree(child.tmp_dir, ignore_errors=True)
        cause = child.cause or f"the grader's process {report}"
        if child.suspect is not None:
            child.suspect.finish(failed("error", time.monotonic() - child.suspect.since, cause))
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._give_up(f"cannot be started ({MAX_FAILED_STARTS} times): {cause}")

    def _give_up(self, why: str) -> None:
        """The grader is unusable: fail everybody who waits for a child. The next items try again."""
        error = ConfigError(f"{self._grader} {why}")
        self._failed_starts, self._usable = 0, False
        self._take_incoming()
        for job in self._queue:
            if not job.batch.future.done():
                job.batch.future.set_exception(error)
        self._queue.clear()
        self._answer_starters(error)

    def _shut_down(self) -> None:
        self._take_incoming()
        for child in self._children:
            self._end(child, None, "")
        while self._children:
            for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                if key.data in self._children and key.fileobj is key.data.control:
                    self._read_control(key.data)
            self._check_deadlines()
        for process in self._leaving:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
        for job in self._queue:
            job.finish(failed("error", 0.0, "the pool was closed"))
        self._answer_starters(RuntimeError("the reward pool was closed"))
        for closing in (self._selector, self._wake_read, self._wake_write):
            closing.close()

    # --- time ---

    def _deadline(self, child: Child) -> float | None:
        if child.state == "ending":
            return child.since + END_S
        if child.state == "starting":
            return child.since + self._start_timeout_s
        running = child.culprit()
        if running is None:
            return None
        return running.since + self._timeout_s + (GRACE_S if child.concurrent else 0.0)

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [d for c in self._children if (d := self._deadline(c)) is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _is_late(self, child: Child) -> bool:
        deadline = self._deadline(child)
        return deadline is not None and time.monotonic() >= deadline

    def _check_deadlines(self) -> None:
        for child in [c for c in self._children if self._is_late(c)]:
            if child.state != "ending":
                self._read_work(child)  # an answer may have come in the meantime
            late = child.culprit()
            if not self._is_late(child):
                continue
            if child.state == "ending":
                self._forget(child, "did not end in time and was killed", guarded=False)
            elif late is None:
                self._end(child, None, f"no answer within {self._start_timeout_s:g} s of its start")
            else:
                late.finish(failed("timeout", time.monotonic() - late.since, f"no score within {self._timeout_s:g} s"))
                del child.jobs[late.number]
                self._end(child, None, "")


def start_child() -> Child:
    """Start a guard with its grader; it inherits nothing but its two sockets and the standard error."""
    work, work_theirs = socket.socketpair()
    control, control_theirs = socket.socketpair()
    tmp_dir = tempfile.mkdtemp(prefix="rlsys-reward-")
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    fds = (work_theirs.fileno(), control_theirs.fileno())
    process = subprocess.Popen(
        [sys.executable, "-m", "rlsys.rewards.pool.guard", *map(str, fds), tmp_dir, str(os.getpid())],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search_path},
        start_new_session=True,
    )
    work_theirs.close()
    control_theirs.close()
    work.setblocking(False)
    return Child(process, work, control, tmp_dir, time.monotonic())


def _message(job: Job) -> dict[str, Any]:
    item = job.item
    return {
        "id": job.number,
        "data_source": item.data_source,
        "solution_str": item.solution,
        "ground_truth": plain(item.ground_truth),
        "extra_info": plain(item.extra_info),
    }


def _result(message: Mapping[str, Any]) -> RewardResult:
    seconds = float(message["seconds"])
    if message["status"] == "ok":
        return RewardResult(float(message["score"]), dict(message["extra"]), "ok", seconds)
    return failed("timeout" if message["status"] == "timeout" else "error", seconds, str(message["message"]))


def _tail(text: str) -> str:
    lines = text.strip().splitlines()[-8:]
    return "; it wrote last: " + " | ".join(lines) if lines else ""


def _kill_group(pid: int) -> None:
    if pid > 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
