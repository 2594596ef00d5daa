"""One child of the reward pool: a guard that never runs a grader's code, and the grader it forks.

The pool starts `python -m rlsys.rewards.pool.guard WORK_FD CONTROL_FD TMP_DIR OWNER_PID`. The guard forks the grader,
collects its output, and ends when the grader ends or the pool closes CONTROL_FD (which also happens when the pool's
process is killed). Ending means killing everything that descends from the grader, also what has left its process group,
removing TMP_DIR, and telling the pool how the grader ended. The grader serves WORK_FD in its main thread (serve.py).
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rlsys.rewards.pool.framing import encode
from rlsys.rewards.pool.worker import serve_and_exit

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_S = 0.4
LAST_KILL_S = 30.0
TAIL_BYTES = 4096
PIPE_BYTES = 4096
FORWARD_BYTES = 1 << 20


def main(work_fd: int, control_fd: int, tmp_dir: str, owner_pid: int) -> NoReturn:
    """Guard one grader until it, the pool, or the process that owns the pool ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    log_read, log_write = os.pipe()
    grader = os.fork()
    if grader == 0:
        os.close(control_fd)
        os.close(log_read)
        _become_grader(log_write, tmp_dir)
        serve_and_exit(socket.socket(fileno=work_fd))
    os.close(work_fd)
    os.close(log_write)
    control = socket.socket(fileno=control_fd)
    _send(control, {"event": "started", "pid": grader})
    tail = _watch(grader, control, log_read, owner_pid)
    status = _kill_descendants(grader, KILL_S)
    shutil.rmtree(tmp_dir, ignore_errors=True)
    _send(control, {"event": "ended", "cause": _cause(status), "tail": tail.decode(errors="replace")})
    _kill_descendants(grader, LAST_KILL_S)
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


def _kill_descendants(grader: int, seconds: float) -> int:
    """Kill and reap all descendants; returns the grader's wait status. Orphans come to the guard as its children."""
    status, give_up = 0, time.monotonic() + seconds
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
        number = os.WTERMSIG(status)
        return f"killed by {next((s.name for s in signal.Signals if s == number), f'signal {number}')}"
    return f"exited with code {os.waitstatus_to_exitcode(status)}"


def _become_grader(log_write: int, tmp_dir: str) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_write, 1)
    os.dup2(log_write, 2)
    os.close(log_write)
    os.environ["TMPDIR"] = tmp_dir
    sys.stdout.reconfigure(line_buffering=True)  # pyrefly: ignore[missing-attribute]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
