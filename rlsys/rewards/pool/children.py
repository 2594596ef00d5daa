"""The child processes of a reward pool: started, fed, timed and replaced by tasks of the pool's event loop."""

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlsys.rewards.pool import messages
from rlsys.rewards.pool.messages import RewardItem, RewardResult, failed
from rlsys.telemetry.jsonl import plain
from rlsys.telemetry.log import get_logger
from rlsys.utils.errors import ConfigError

log = get_logger(__name__)
ROOT = Path(__file__).resolve().parents[3]
ASYNC_WINDOW = 64
STALLED_S = 1.0
"""An async worker reports its timeouts itself; one that is this much later has a stalled event loop."""
START_S = 60.0
"""How long a child may take to load the grader."""
END_S = 5.0
"""How long a guard may take to end its worker; a new child is started at once."""
MAX_FAILED_STARTS = 3
FOLDER_PREFIX, SWEEP_AGE_S = "rlsys-reward-", 60.0


@dataclass(eq=False)
class PendingItem:
    """One item to grade, or None to see that a child is ready.

    `replied` is set when the child that got it at `sent_s` has answered or ended.
    """

    number: int
    item: RewardItem | None
    result: asyncio.Future[RewardResult]
    replied: asyncio.Event = field(default_factory=asyncio.Event)
    sent_s: float = 0.0

    def finish(self, result: RewardResult) -> None:
        """Set the result, once."""
        if not self.result.done():
            self.result.set_result(result)


class Child:
    """A guard process with its worker, and the items that the worker has."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.items: dict[int, PendingItem] = {}
        self.is_async = self.is_late = False
        self.cause = ""
        self.loaded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self._report: messages.WorkerEnded | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def load(self, grader: messages.Grader, *, timeout_s: float) -> bool:
        """Start the processes and wait for the grader; False, with the `cause`, if it cannot be started now.

        They inherit only their two pipes and the standard error. ConfigError where the grader cannot be loaded.
        """
        search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rlsys.rewards.pool.guard", self.folder, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=messages.MAX_LINE_BYTES,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search_path},
                start_new_session=True,
            )
        except OSError as error:
            self.cause = str(error)
            return False
        assert self._process.stdout is not None
        self._reading = asyncio.create_task(self._read(self._process.stdout))
        path = grader.path and (grader.path if "://" in grader.path else str(Path(grader.path).resolve()))
        self._send(messages.LoadGrader(replace(grader, path=path, kwargs=plain(grader.kwargs)), timeout_s))
        done, _ = await asyncio.wait({self.loaded}, timeout=START_S)
        if not done:
            self.cause = f"no answer within {START_S:g} s of its start, in which it imports its code"
            return False
        if problem := self.loaded.result():
            raise ConfigError(f"cannot be loaded: {problem}")
        return not self.ended.is_set()

    def _send(self, message: messages.LoadGrader | messages.GradeItem) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(messages.pack(message))

    async def grade(self, item: PendingItem, *, limit_s: float) -> None:
        """Have the worker grade an item; without an answer in time the child is late and of no use any more."""
        if item.item is None:
            item.finish(RewardResult(0.0, {}, "ok", 0.0))
            return
        try:
            self._send(messages.GradeItem(item.number, item.item.as_json()))
        except (TypeError, ValueError, RecursionError) as error:
            item.finish(failed("error", 0.0, f"the item cannot be sent to a grader: {error}"))
            return
        item.sent_s = time.monotonic()
        item.replied.clear()
        self.items[item.number] = item
        try:
            await asyncio.wait_for(item.replied.wait(), limit_s)
        except TimeoutError:
            self.is_late = True
            self.ended.set()

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        while not stdout.at_eof():
            try:
                if (line := await stdout.readline()).strip():
                    self._take(messages.unpack(line, messages.FromChild))
            except ValueError as error:
                self.cause = f"the grader wrote to the pool's pipe: {error!r}"
                self._lose()
        self._lose()

    def _lose(self) -> None:
        """The worker has ended, or what it writes cannot be trusted."""
        self.ended.set()
        for item in self.items.values():
            item.replied.set()
        if not self.loaded.done():
            self.loaded.set_result("")

    def _take(self, message: messages.FromChild) -> None:
        match message:
            case messages.WorkerEnded():
                self._report = message
                self._lose()
            case messages.ItemGraded():
                if item := self.items.pop(message.id, None):
                    item.finish(message.result)
                    item.replied.set()
            case messages.GraderLoaded() if not self.loaded.done():
                self.is_async = message.is_async
                self.loaded.set_result(message.problem)

    async def end(self) -> str:
        """End both processes and remove their folder; returns how the worker ended, with its last output."""
        if self._process is not None and self._process.stdin is not None:
            if not self._process.stdin.is_closing():
                self._process.stdin.transport.abort()
            try:
                await asyncio.wait_for(self._process.wait(), END_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=END_S)
        report = self._report or messages.WorkerEnded("was lost with its guard, which did not report in time")
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        lines = report.tail.strip().splitlines()[-8:]
        tail = "; its last output: " + " | ".join(lines) if lines else ""
        return self.cause or f"the grader's process {report.cause}{tail}"


class Children:
    """Keeps `num_workers` children running and grades items by them; every method runs in one event loop."""

    def __init__(self, grader: messages.Grader, *, num_workers: int, timeout_s: float) -> None:
        self._grader, self._num_workers, self._timeout_s = grader, num_workers, timeout_s
        self._queue: asyncio.Queue[PendingItem] = asyncio.Queue()
        self._slots: list[asyncio.Task[None]] = []
        self._endings: set[asyncio.Task[str]] = set()
        self._num_items, self._failed_starts, self._warns = 0, 0, grader.targets is None

    async def grade(self, items: Sequence[RewardItem | None]) -> list[RewardResult]:
        """Results of `items` in their order; that of None comes when a child has loaded the grader.

        ConfigError where none can load it.
        """
        loop = asyncio.get_running_loop()
        pending = [PendingItem(at, item, loop.create_future()) for at, item in enumerate(items, self._num_items)]
        self._num_items += len(items)
        for item in pending:
            item.result.add_done_callback(self._warn)
            self._queue.put_nowait(item)
        self._slots = [slot for slot in self._slots if not slot.done()]
        while len(self._slots) < self._num_workers:
            self._slots.append(asyncio.create_task(self._slot()))
        return await asyncio.gather(*(item.result for item in pending))

    def _warn(self, done: asyncio.Future[RewardResult]) -> None:
        """Warn of the first answer without a score, which may be hours before those of its batch are graded."""
        if self._warns and not done.cancelled() and done.exception() is None and done.result().status != "ok":
            self._warns = False
            log.warning("an answer could not be graded: %s", done.result().message)

    async def close(self) -> None:
        """End all children; what was not graded is an error."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        while self._endings:
            await asyncio.gather(*self._endings)
        self._give_up(None)

    def _give_up(self, error: ConfigError | None) -> None:
        """Nothing grades what waits: an error of the grader's file, or the pool is closed. The next items try again."""
        self._failed_starts = 0
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if error is None:
                item.finish(failed("error", 0.0, "the pool was closed"))
            elif not item.result.done():
                item.result.set_exception(error)

    async def _slot(self) -> None:
        """One child after the other, until the grader turns out to be unusable.

        Of several items that an async child had when it ended, each is graded again alone, to find the one at fault.
        """
        suspects: deque[PendingItem] = deque()
        try:
            while True:
                child, loaded = Child(), False
                try:
                    loaded = await child.load(self._grader, timeout_s=self._timeout_s)
                    if loaded:
                        await self._serve(child, suspects)
                finally:
                    unfinished = list(child.items.values())
                    culprit = unfinished.pop() if len(unfinished) == 1 else None
                    suspects.extendleft(reversed(unfinished))
                    ending = asyncio.create_task(self._end(child, culprit))
                    self._endings.add(ending)
                    ending.add_done_callback(self._endings.discard)
                self._failed_starts = 0 if loaded else self._failed_starts + 1
                if self._failed_starts >= MAX_FAILED_STARTS:
                    raise ConfigError(f"cannot be started ({MAX_FAILED_STARTS} times): {await ending}")
                await asyncio.sleep(0.2 * self._failed_starts)
        except (ConfigError, OSError, asyncio.CancelledError) as error:
            for item in suspects:
                self._queue.put_nowait(item)
            if not isinstance(error, asyncio.CancelledError):
                self._give_up(ConfigError(f"{self._grader} {error}"))

    async def _serve(self, child: Child, suspects: deque[PendingItem]) -> None:
        """Have the child grade until it ends or an item is late."""
        lanes: list[asyncio.Task[None]] = []
        try:
            while suspects and not child.ended.is_set():
                await self._grade(child, suspects.popleft())
            lanes = [asyncio.create_task(self._lane(child)) for _ in range(ASYNC_WINDOW if child.is_async else 1)]
            await child.ended.wait()
        finally:
            for lane in lanes:
                lane.cancel()

    async def _lane(self, child: Child) -> None:
        while not child.ended.is_set():
            await self._grade(child, await self._queue.get())

    async def _grade(self, child: Child, item: PendingItem) -> None:
        if not item.result.done():
            await child.grade(item, limit_s=self._timeout_s + (STALLED_S if child.is_async else 0.0))

    async def _end(self, child: Child, culprit: PendingItem | None) -> str:
        """End a child; the only item that it had is at fault."""
        seconds = time.monotonic() - culprit.sent_s if culprit else 0.0
        if culprit and child.is_late:
            culprit.finish(failed("timeout", seconds, messages.late(self._timeout_s)))
        cause = await child.end()
        if culprit:
            culprit.finish(failed("error", seconds, cause))
        return cause


def remove_abandoned_folders() -> None:
    """Remove the folders of children whose owner is gone: those that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < SWEEP_AGE_S:
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
