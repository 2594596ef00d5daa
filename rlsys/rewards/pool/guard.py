"""One child of the reward pool: a guard that never runs a grader's code, and the worker process it forks.

The pool starts `python -m rlsys.rewards.pool.guard TMP_DIR OWNER_PID`, whose standard input and output are the pipes
that the worker serves. The guard forks the worker, collects its output, and ends when the worker ends or the pool
closes the input (which also happens when the pool's process is killed). Ending means killing all descendants of the
worker, also those that left its process group, removing TMP_DIR, and writing how the worker ended as the last message.
"""

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from rlsys.rewards.pool.messages import WorkerEnded, pack
from rlsys.rewards.pool.worker import serve_and_exit

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_S = 0.4
LAST_KILL_S = 30.0
TAIL_BYTES = 4096
PIPE_BYTES = 4096
FORWARD_BYTES = 1 << 20


def main(tmp_dir: str, owner_pid: int) -> NoReturn:
    """Guard one worker until it, the pool, or the process that owns the pool ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    log_read, log_write = os.pipe()
    os.set_blocking(log_read, False)
    child_ended, child_ended_write = os.pipe()
    os.set_blocking(child_ended_write, False)
    signal.set_wakeup_fd(child_ended_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    worker = os.fork()
    if worker == 0:
        for fd in (log_read, child_ended, child_ended_write):
            os.close(fd)
        pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        _become_worker(log_write, tmp_dir)
        serve_and_exit(*pipes)
    os.close(log_write)
    status, tail = _watch(worker, log_read, child_ended, owner_pid)
    status = _kill_descendants(worker, status, KILL_S)
    shutil.rmtree(tmp_dir, ignore_errors=True)
    with suppress(OSError):  # the pool is gone, and the rest of the work does not need it
        os.write(1, b"\n" + pack(WorkerEnded(_cause(status), tail.decode(errors="replace"))))
    _kill_descendants(worker, status, LAST_KILL_S)
    os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":  # other systems do not follow a grader's processes out of its group
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _watch(worker: int, log_read: int, child_ended: int, owner_pid: int) -> tuple[int | None, bytes]:
    """Collect output until the worker or the pool ends; the worker's wait status if it ended, and the last output.

    Its beginning is copied to the standard error of the pool's process, as much as can be written without waiting.
    """
    poller = select.poll()
    poller.register(0, 0)  # reports that the pool has closed it
    for fd in (child_ended, log_read):
        poller.register(fd, select.POLLIN)
    tail, left = b"", FORWARD_BYTES
    while True:
        ready = dict(poller.poll(1000))
        if log_read in ready:
            data = os.read(log_read, PIPE_BYTES)
            if not data:
                poller.unregister(log_read)
            tail = (tail + data)[-TAIL_BYTES:]
            shown = data[:left]
            if shown and select.select([], [2], [], 0)[1]:
                os.write(2, shown)
            left -= len(shown)
        if 0 in ready or os.getppid() != owner_pid:
            return None, tail
        if child_ended in ready:
            os.read(child_ended, PIPE_BYTES)
            pid, status = os.waitpid(worker, os.WNOHANG)
            if pid:
                with suppress(BlockingIOError):
                    tail += os.read(log_read, 1 << 20)
                return status, tail[-TAIL_BYTES:]


def _kill_descendants(worker: int, status: int | None, seconds: float) -> int:
    """Kill and reap all descendants; returns the worker's wait status. Orphans become children of the guard."""
    import psutil  # not needed before, and a worker waits for every import of this file

    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                status = reaped[1] if reaped[0] == worker else status
        except ChildProcessError:
            break
        time.sleep(0.002)
    return status or 0


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"killed by {next((s.name for s in signal.Signals if s == number), f'signal {number}')}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


def _become_worker(log_write: int, tmp_dir: str) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_write, 1)
    os.dup2(log_write, 2)
    os.close(log_write)
    os.environ["TMPDIR"] = tmp_dir
    sys.stdout.reconfigure(line_buffering=True)  # pyrefly: ignore[missing-attribute]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
