"""The reward pool's own thread: starts child processes, feeds and reads them, enforces deadlines, and replaces them."""

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
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlsys.ipc.framing import FrameBuffer, WireError
from rlsys.rewards.pool.messages import (
    MAX_FRAME_BYTES,
    GradeItem,
    Grader,
    GraderReady,
    GraderUnusable,
    ItemGraded,
    LoadGrader,
    RewardItem,
    RewardResult,
    WorkerEnded,
    WorkerStarted,
    failed,
    pack,
    plain,
    unpack,
)
from rlsys.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
ASYNC_WINDOW = 64
STALLED_S = 1.0
"""An async worker reports its timeouts itself; one that is this much later has a stalled event loop."""
END_S = 5.0
"""How long a guard may take to end its worker; a new child is started at once."""
MAX_FAILED_STARTS = 3


class PendingBatch:
    """Items that were submitted together and the future of their results."""

    def __init__(self, num_items: int) -> None:
        self.results: list[RewardResult | None] = [None] * num_items
        self.num_missing = num_items
        self.abandoned = False
        self.future: Future[list[RewardResult]] = Future()
        self.future.set_running_or_notify_cancel()
        if num_items == 0:
            self.future.set_result([])


@dataclass(eq=False)
class PendingItem:
    """One item to grade. `sent_s` is when a child got it; one that is `alone` shares its child with no other item."""

    number: int
    item: RewardItem
    batch: PendingBatch
    index: int
    sent_s: float = 0.0
    alone: bool = False

    def finish(self, result: RewardResult) -> None:
        """Set the result of this item, once."""
        batch = self.batch
        if batch.results[self.index] is None:
            batch.results[self.index] = result
            batch.num_missing -= 1
            if batch.num_missing == 0 and not batch.future.done():
                batch.future.set_result([r for r in batch.results if r is not None])

    @property
    def is_wanted(self) -> bool:
        """Whether anything waits for the result."""
        return not self.batch.abandoned and not self.batch.future.done()

    def message(self) -> GradeItem:
        """What the worker gets."""
        item = self.item
        return GradeItem(self.number, item.data_source, item.solution, plain(item.ground_truth), plain(item.extra_info))


def _frames() -> FrameBuffer:
    return FrameBuffer(max_bytes=MAX_FRAME_BYTES)


@dataclass(eq=False)
class Child:
    """A guard process, the socket to it, and the socket to its worker."""

    process: subprocess.Popen[bytes]
    work: socket.socket
    control: socket.socket
    tmp_dir: str
    since_s: float
    state: Literal["starting", "ready", "ending"] = "starting"
    is_async: bool = False
    worker_pid: int = 0
    items: dict[int, PendingItem] = field(default_factory=dict)
    unsent: bytearray = field(default_factory=bytearray)
    work_frames: FrameBuffer = field(default_factory=_frames)
    control_frames: FrameBuffer = field(default_factory=_frames)
    culprit: PendingItem | None = None
    cause: str = ""

    def has_room(self, item: PendingItem) -> bool:
        """Whether this item may be sent now."""
        if self.state != "ready" or not self.items:
            return self.state == "ready"
        is_shared = self.is_async and not item.alone and not any(other.alone for other in self.items.values())
        return is_shared and len(self.items) < ASYNC_WINDOW


class PoolLoop:
    """The state of a running pool. All methods but `add` and `stop` belong to the thread that calls `run`."""

    def __init__(self, grader: Grader, *, num_workers: int, timeout_s: float, start_timeout_s: float) -> None:
        self._grader, self._num_workers = grader, num_workers
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._incoming: deque[PendingItem | Future[None]] = deque()
        self._queue: deque[PendingItem] = deque()
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

    def add(self, work: Sequence[PendingItem | Future[None]]) -> None:
        """Add items, or futures that are set when the first child is ready."""
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
        """Serve until `stop`."""
        while not self._stopping:
            self._take_incoming()
            if self._queue or self._starters or self._usable:
                self._start_missing()
            self._send_items()
            for key, events in self._selector.select(self._seconds_to_next_deadline()):
                self._handle(key, events)
            self._check_deadlines()
            self._leaving = [process for process in self._leaving if process.poll() is None]
        self._shut_down()

    def _take_incoming(self) -> None:
        while self._incoming:
            work = self._incoming.popleft()
            if isinstance(work, PendingItem):
                self._queue.append(work)
            else:
                self._starters.append(work)
        if any(child.state == "ready" for child in self._children):
            self._answer_starters(None)

    def _answer_starters(self, error: Exception | None) -> None:
        for starter in self._starters:
            if error:
                starter.set_exception(error)
            else:
                starter.set_result(None)
        self._starters.clear()

    # --- sending ---

    def _start_missing(self) -> None:
        for _ in range(sum(child.state != "ending" for child in self._children), self._num_workers):
            child = start_child()
            self._children.append(child)
            self._selector.register(child.control, selectors.EVENT_READ, child)
            self._selector.register(child.work, selectors.EVENT_READ, child)
            grader = self._grader
            path = None if grader.path is None else str(Path(grader.path).resolve())
            child.unsent += pack(LoadGrader(path, grader.name, plain(grader.kwargs), self._timeout_s))
            self._flush(child)

    def _send_items(self) -> None:
        """Give the items in line to the children with the fewest, as far as these have room."""
        while self._queue:
            item = self._queue[0]
            free = [child for child in self._children if child.has_room(item)]
            if not free:
                return
            self._queue.popleft()
            if item.is_wanted:
                self._send(min(free, key=lambda child: len(child.items)), item)

    def _send(self, child: Child, item: PendingItem) -> None:
        try:
            frame = pack(item.message())
        except (TypeError, ValueError, RecursionError) as error:
            item.finish(failed("error", 0.0, f"the item cannot be sent to a grader: {error}"))
            return
        item.sent_s = time.monotonic()
        child.items[item.number] = item
        child.unsent += frame
        self._flush(child)

    def _flush(self, child: Child) -> None:
        try:
            while child.unsent:
                del child.unsent[: child.work.send(child.unsent)]
        except BlockingIOError:
            pass  # the selector reports when there is room again
        except OSError:
            child.unsent.clear()  # reading will show that it has ended
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
            self._fail(child, "")
            return
        try:
            for parts in child.work_frames.feed(data):
                self._take_message(child, unpack(parts, GraderReady | GraderUnusable | ItemGraded))
        except WireError as error:
            self._fail(child, f"the grader wrote to the pool's socket: {error!r}")

    def _take_message(self, child: Child, message: GraderReady | GraderUnusable | ItemGraded) -> None:
        match message:
            case GraderReady():
                child.state, child.is_async = "ready", message.is_async
                self._failed_starts, self._usable = 0, True
                self._answer_starters(None)
            case GraderUnusable():
                self._end(child)
                self._give_up(f"cannot be loaded: {message.message}")
            case ItemGraded():
                item = child.items.pop(message.id, None)
                if item is not None:
                    item.finish(message.result())

    def _read_control(self, child: Child) -> None:
        try:
            data = child.control.recv(1 << 16)
            frames = child.control_frames.feed(data)
            messages = [unpack(parts, WorkerStarted | WorkerEnded) for parts in frames] if data else [None]
        except (OSError, WireError):
            messages = [None]
        for message in messages:
            if isinstance(message, WorkerStarted):
                child.worker_pid = message.pid
                continue
            for _ in range(4):
                if child.state != "ending":
                    self._read_work(child)
            self._fail(child, "")
            self._forget(child, message)
            return

    # --- ending ---

    def _fail(self, child: Child, cause: str) -> None:
        """End a child that is of no use any more: its item is to blame; of several, each is graded again alone."""
        if child.state != "ending":
            items = list(child.items.values())
            if len(items) == 1:
                child.culprit = child.items.pop(items[0].number)
            for item in items:
                item.alone = True
            self._end(child, cause)

    def _end(self, child: Child, cause: str = "") -> None:
        """Stop using a child: its culprit is answered when its guard has reported, its other items are queued again."""
        self._failed_starts += child.state == "starting"
        child.state, child.since_s, child.cause = "ending", time.monotonic(), cause
        self._selector.unregister(child.work)
        child.work.close()
        with suppress(OSError):
            child.control.shutdown(socket.SHUT_WR)
        self._queue.extendleft(reversed(child.items.values()))
        child.items.clear()

    def _forget(self, child: Child, report: WorkerEnded | None) -> None:
        """The child has ended. Without a report of its guard, the processes that are known of it are killed."""
        self._selector.unregister(child.control)
        child.control.close()
        self._children.remove(child)
        if report is None:
            report = WorkerEnded("was lost with its guard, which did not report in time")
            _kill_group(child.worker_pid)
            child.process.kill()
        self._leaving.append(child.process)
        shutil.rmtree(child.tmp_dir, ignore_errors=True)
        cause = child.cause or f"the grader's process {report.cause}{_tail(report.tail)}"
        if child.culprit is not None:
            child.culprit.finish(failed("error", time.monotonic() - child.culprit.sent_s, cause))
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._give_up(f"cannot be started ({MAX_FAILED_STARTS} times): {cause}")

    def _give_up(self, why: str) -> None:
        """The grader is unusable: fail all that waits for a child. The next items try again."""
        error = ConfigError(f"{self._grader} {why}")
        self._failed_starts, self._usable = 0, False
        self._take_incoming()
        for item in self._queue:
            if not item.batch.future.done():
                item.batch.future.set_exception(error)
        self._queue.clear()
        self._answer_starters(error)

    def _shut_down(self) -> None:
        self._take_incoming()
        for child in self._children:
            if child.state != "ending":
                self._end(child)
        while self._children:
            for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                if key.data in self._children and key.fileobj is key.data.control:
                    self._read_control(key.data)
            self._check_deadlines()
        for process in self._leaving:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
        for item in self._queue:
            item.finish(failed("error", 0.0, "the pool was closed"))
        self._answer_starters(RuntimeError("the reward pool was closed"))
        for closing in (self._selector, self._wake_read, self._wake_write):
            closing.close()

    # --- time ---

    def _deadline(self, child: Child) -> float | None:
        if child.state == "ending":
            return child.since_s + END_S
        if child.state == "starting":
            return child.since_s + self._start_timeout_s
        oldest = next(iter(child.items.values()), None)
        if oldest is None:
            return None
        return oldest.sent_s + self._timeout_s + (STALLED_S if child.is_async else 0.0)

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [d for child in self._children if (d := self._deadline(child)) is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _is_late(self, child: Child) -> bool:
        deadline = self._deadline(child)
        return deadline is not None and time.monotonic() >= deadline

    def _check_deadlines(self) -> None:
        for child in [child for child in self._children if self._is_late(child)]:
            if child.state != "ending":
                self._read_work(child)  # an answer may have come in the meantime
            if not self._is_late(child):
                continue
            if child.state == "ending":
                self._forget(child, None)
            elif child.state == "starting":
                self._end(child, f"no answer within {self._start_timeout_s:g} s of its start")
            else:
                self._time_out(child)

    def _time_out(self, child: Child) -> None:
        """One item is late; of several, one stalls the event loop for all, and each is graded again alone."""
        if len(child.items) == 1:
            (item,) = child.items.values()
            seconds = time.monotonic() - item.sent_s
            item.finish(failed("timeout", seconds, f"no score within {self._timeout_s:g} s"))
            child.items.clear()
        self._fail(child, "")


def start_child() -> Child:
    """Start a guard with its worker; it inherits only its two sockets and the standard error."""
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


def _tail(text: str) -> str:
    lines = text.strip().splitlines()[-8:]
    return "; its last output: " + " | ".join(lines) if lines else ""


def _kill_group(pid: int) -> None:
    if pid > 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
