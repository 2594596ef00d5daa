"""What can be seen of a worker process from outside: its last lines, its state, the stack of its main thread."""

import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlsys.utils.polling import poll_until

TAIL_LINES = 20
TAIL_BYTES = 8192
STACK_SIGNAL, STACK_WAIT_S, STACK_LINES, POLL_S = signal.SIGUSR2, 1.0, 12, 0.02
SAME_START_S = 2.0
"""Start times of one process differ by this much at most, where the clock was set in the meantime."""
STATES = {
    psutil.STATUS_DISK_SLEEP: "waiting for a disk or device",
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_ZOMBIE: "dead",
}


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker runs: its process, its node's id in the Ray cluster, and a port that was free there at its start.

    `started_s` distinguishes it from a later process with its pid. `logs` are the files that hold its output, empty
    when it is not written to files.
    """

    pid: int
    started_s: float
    host: str
    node_id: str
    address: str
    port: int
    leads_group: bool
    logs: tuple[str, ...] = ()


def here(node_id: str, address: str, port: int) -> ProcessInfo:
    """This process."""
    pid, process = os.getpid(), psutil.Process()
    files = {file.fd: file.path for file in process.open_files()}
    logs = tuple(dict.fromkeys(files[output] for output in (1, 2) if output in files))
    started_s, leads_group = process.create_time(), os.getpgrp() == pid
    return ProcessInfo(pid, started_s, socket.gethostname(), node_id, address, port, leads_group, logs)


def log_tail(info: ProcessInfo) -> str:
    """The last lines a process wrote, its standard output before its standard error; empty if they cannot be read."""
    return "\n".join(line for path in info.logs for line in _last_lines(Path(path)))


def diagnose(info: ProcessInfo) -> str:
    """One line on a silent process and, if it responds to a signal, the stack of its main thread."""
    state = _state(info)
    stack = _stack(info) if state in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING) else ""
    text = f"pid {info.pid} is {STATES.get(state, state)}"
    return f"{text}; its stack is\n{stack}" if stack else text


def kill_with_children(info: ProcessInfo) -> None:
    """SIGKILL a worker of this host and the processes of its group, which may outlive it; no error if all are gone."""
    process = _find(info)
    if process is None and psutil.pid_exists(info.pid):
        return
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if info.leads_group:
            os.killpg(info.pid, signal.SIGKILL)
        elif process is not None:
            process.kill()


def wait_gone(info: ProcessInfo, timeout_s: float) -> bool:
    """Wait for a process of this host to end; whether it has. A zombie is dead."""
    return poll_until(lambda: _state(info) == psutil.STATUS_ZOMBIE, timeout_s, every_s=POLL_S)


def _find(info: ProcessInfo) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(info.pid)
        return process if abs(process.create_time() - info.started_s) < SAME_START_S else None
    return None


def _state(info: ProcessInfo) -> str:
    with suppress(psutil.NoSuchProcess):
        if (process := _find(info)) is not None:
            return process.status()
    return psutil.STATUS_ZOMBIE


def _lines_from(path: Path, start: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(65536).decode(errors="replace").splitlines()


def _last_lines(path: Path) -> list[str]:
    with suppress(OSError):
        lines = _lines_from(path, max(0, path.stat().st_size - TAIL_BYTES))
        return [line for line in lines if line.strip() and not line.startswith(":")][-TAIL_LINES:]
    return []


def _stack(info: ProcessInfo) -> str:
    """The main thread's stack, requested by a signal and read from its log; empty if it does not write one."""
    if not info.logs:
        return ""
    log = Path(info.logs[-1])
    try:
        before = log.stat().st_size
        os.kill(info.pid, STACK_SIGNAL)
        poll_until(lambda: log.stat().st_size != before, STACK_WAIT_S, every_s=POLL_S)
        time.sleep(POLL_S)
        lines = _lines_from(log, before)
    except OSError:
        return ""
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0)
    return "\n".join(lines[start + 1 : start + 1 + STACK_LINES])
