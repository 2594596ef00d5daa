"""One child of the reward pool: a guard that never runs a grader's code, and the grader it forks.

The pool starts `python -m rlsys.rewards.child WORK_FD CONTROL_FD TMP_DIR OWNER_PID`. The guard forks the grader,
collects its output, and ends when the grader ends or the pool closes CONTROL_FD (which also happens when the pool's
process is killed). Ending means killing everything that descends from the grader, also what has left its process group,
removing TMP_DIR, and telling the pool how the grader ended. The grader serves WORK_FD in its main thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlsys.rewards.frames import FrameBuffer, encode, plain, receive
from rlsys.utils.plugins import load_from_file

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_S = 0.4
TAIL_BYTES = 4096
PIPE_BYTES = 4096
FORWARD_BYTES = 1 << 20
MAX_EXTRA_BYTES = 1 << 20

ComputeScore = Callable[..., Any]


def main(work_fd: int, control_fd: int, tmp_dir: str, owner_pid: int) -> NoReturn:
    """Guard one grader until it, the pool, or the process that owns the pool ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    log_read, log_write = os.pipe()
    grader = os.fork()
    if grader == 0:
        os.close(control_fd)
        os.close(log_read)
        _become_grader(log_write, tmp_dir)
        _serve_and_exit(socket.socket(fileno=work_fd))
    os.close(work_fd)
    os.close(log_write)
    control = socket.socket(fileno=control_fd)
    _send(control, {"event": "started", "pid": grader})
    tail = _watch(grader, control, log_read, owner_pid)
    status = _kill_descendants(grader)
    shutil.rmtree(tmp_dir, ignore_errors=True)
    _send(control, {"event": "ended", "cause": _cause(status), "tail": tail.decode(errors="replace")})
    os._exit(0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    try:
        sock.sendall(encode(message))
    except OSError:
        return  # the pool is gone; what remains to be done does not need it


def _watch(grader: int, control: socket.socket, log_read: int, owner_pid: int) -> bytes:
    """Collect output until the grader or the pool ends; returns the last of it."""
    ended = os.pidfd_open(grader)
    poller = select.poll()
    for fd in (ended, control.fileno(), log_read):
        poller.register(fd, select.POLLIN)
    tail, left = b"", FORWARD_BYTES
    while True:
        ready = dict(poller.poll(1000))
        if log_read in ready:
            data = os.read(log_read, PIPE_BYTES)
            if not data:
                poller.unregister(log_read)
            tail = (tail + data)[-TAIL_BYTES:]
            left -= _forward(data[:left])
        if control.fileno() in ready or os.getppid() != owner_pid:
            return tail
        if ended in ready:
            return (tail + _last_output(log_read))[-TAIL_BYTES:]


def _last_output(log_read: int) -> bytes:
    os.set_blocking(log_read, False)
    try:
        return os.read(log_read, 1 << 20)
    except BlockingIOError:
        return b""


def _forward(data: bytes) -> int:
    """Show a grader's output where the pool's process shows its own errors, as far as it goes without waiting."""
    if data and select.select([], [2], [], 0)[1]:
        os.write(2, data)
    return len(data)


def _kill_descendants(grader: int) -> int:
    """Kill and reap all descendants; returns the grader's wait status. Orphans come to the guard as its children."""
    status, give_up = 0, time.monotonic() + KILL_S
    while time.monotonic() < give_up:
        for pid in _descendants(os.getpid()):
            _kill(pid)
        try:
            while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                status = found[1] if found[0] == grader else status
        except ChildProcessError:
            break
        time.sleep(0.002)
    return status


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path("/proc", entry, "stat").read_bytes()
            except OSError:
                continue
            parents.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


# --- the grader ---


def _become_grader(log_write: int, tmp_dir: str) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_write, 1)
    os.dup2(log_write, 2)
    os.close(log_write)
    os.environ["TMPDIR"] = tmp_dir
    sys.stdout.reconfigure(line_buffering=True)  # pyrefly: ignore[missing-attribute]


def _serve_and_exit(work: socket.socket) -> NoReturn:
    code = 1
    try:
        first = receive(work)
        if first is not None:
            _serve(work, first)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0
    except (Exception, SystemExit, KeyboardInterrupt):
        traceback.print_exc()
    os._exit(code)


def _serve(work: socket.socket, first: Mapping[str, Any]) -> None:
    try:
        grade = load_grader(first["path"], first["name"])
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        work.sendall(encode({"event": "unusable", "message": describe(error)}))
        return
    concurrent = inspect.iscoroutinefunction(grade)
    work.sendall(encode({"event": "ready", "concurrent": concurrent}))
    if concurrent:
        asyncio.run(_serve_concurrently(work, grade, first["kwargs"], first["timeout_s"]))
    else:
        _serve_in_turn(work, grade, first["kwargs"])


def load_grader(path: str | None, name: str) -> ComputeScore:
    """The function `name` of the local file `path`, or the built-in router when there is no path."""
    if path is None:
        from rlsys.rewards.registry import compute_score, warm_up

        warm_up()
        return compute_score
    grade = load_from_file(path, name, key="custom_reward_function")
    if not callable(grade):
        raise TypeError(f"{name} is not a function")
    return grade


def _arguments(message: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    return {**{name: message[name] for name in names}, **kwargs}


def _serve_in_turn(work: socket.socket, grade: ComputeScore, kwargs: Mapping[str, Any]) -> None:
    while (message := receive(work)) is not None:
        start = time.perf_counter()
        try:
            value = grade(**_arguments(message, kwargs))
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            answer = _scored(value)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            answer = _unscored(error)
        work.sendall(encode({"id": message["id"], "seconds": time.perf_counter() - start, **answer}))


async def _serve_concurrently(
    work: socket.socket, grade: ComputeScore, kwargs: Mapping[str, Any], timeout_s: float
) -> None:
    """Run every item that arrives as a task; before a task runs on, the pool is told whose turn it is."""
    work.setblocking(False)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    running = _Running(work)

    async def one(message: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        answer: dict[str, Any] = {"status": "timeout", "message": f"no score within {timeout_s:g} s"}
        try:
            task = asyncio.ensure_future(_Turns(grade(**_arguments(message, kwargs)), message["id"], running))
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            task.cancel()
            if done:
                answer = _scored(task.result())
        except Exception as error:
            answer = _unscored(error)
        running.write(encode({"id": message["id"], "seconds": time.perf_counter() - start, **answer}))

    buffer = FrameBuffer()
    while data := await loop.sock_recv(work, 1 << 20):
        for message in buffer.feed(data):
            task = asyncio.ensure_future(one(message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


class _Running:
    """Writes frames without interleaving and remembers whose turn was announced last."""

    def __init__(self, work: socket.socket) -> None:
        self._work, self._last = work, -1

    def announce(self, number: int) -> None:
        if number != self._last:
            self._last = number
            self.write(encode({"event": "turn", "id": number}))

    def write(self, frame: bytes) -> None:
        self._work.setblocking(True)
        self._work.sendall(frame)
        self._work.setblocking(False)


class _Turns(Coroutine[Any, Any, Any]):
    """A coroutine that announces its number each time it runs on, so that one that never yields can be named."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, running: _Running) -> None:
        self._inner, self._number, self._running = inner, number, running

    def send(self, value: Any, /) -> Any:
        self._running.announce(self._number)
        return self._run_on(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        self._running.announce(self._number)
        return self._run_on(self._inner.throw, *error)

    @staticmethod
    def _run_on(step: Callable[..., Any], *values: Any) -> Any:
        try:
            return step(*values)
        except (SystemExit, KeyboardInterrupt) as error:  # these would end the event loop and all its other tasks
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


def describe(error: BaseException) -> str:
    """One line: type, text and the innermost line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:1000]}{where}"


def _unscored(error: BaseException) -> dict[str, Any]:
    """A grader that gives up in time by TimeoutError is late, not broken."""
    return {"status": "timeout" if isinstance(error, TimeoutError) else "error", "message": describe(error)}


def _scored(value: Any) -> dict[str, Any]:
    score, extra = read_score(value)
    if not math.isfinite(score):
        return {"status": "error", "message": f"the grader returned {score}"}
    if len(encode(extra)) > MAX_EXTRA_BYTES:
        return {"status": "error", "message": f"the grader returned more than {MAX_EXTRA_BYTES} bytes of extra values"}
    return {"status": "ok", "score": score, "extra": extra}


def read_score(value: Any) -> tuple[float, dict[str, Any]]:
    """Score and extra values of what a verl `compute_score` may return.

    A dict carries `score`, its other keys are extra; of a sequence the first counts; a plain number is also `acc`.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"the grader returned a dict without 'score': {sorted(map(str, value))[:10]}")
        extra = {str(k): plain(v) for k, v in value.items() if k != "score"}
        return _number(value["score"]), extra
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        value = value[0]
    score = _number(value)
    return score, {"acc": score}


def _number(value: Any) -> float:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bool | int | float):
        return float(value)
    raise TypeError(f"the grader returned {type(value).__name__} instead of a number")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
