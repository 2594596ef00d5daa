"""What can be told about a worker process from outside: its last lines, its state, where its code stands."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 8192
STACK_SIGNAL = getattr(signal, "SIGUSR2", None)
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or device",
    "T": "stopped by a signal",
    "Z": "dead",
}


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker runs. `start_ticks` tells it from a later process with its id.

    `logs` are the files its output goes to, empty when it goes elsewhere.
    """

    pid: int
    start_ticks: int
    host: str
    address: str
    leads_group: bool
    logs: tuple[str, ...] = ()


def here(address: str) -> ProcessInfo:
    """This process."""
    pid = os.getpid()
    return ProcessInfo(pid, _stat(pid)[1], socket.gethostname(), address, os.getpgrp() == pid, _output_files())


def dump_stacks_on_signal() -> None:
    """Let STACK_SIGNAL write the Python stacks of all threads to stderr."""
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


def log_tail(info: ProcessInfo, num_lines: int = TAIL_LINES) -> str:
    """The last lines a process wrote, its standard output before its standard error; empty if they cannot be read."""
    return "\n".join(line for path in info.logs for line in _last_lines(Path(path), num_lines))


def diagnose(info: ProcessInfo) -> str:
    """One line on a silent process and, where it can still tell, the stack of its main thread."""
    state = _stat(info.pid)[0] if is_alive(info) else "Z"
    text = f"pid {info.pid} is {_STATES.get(state, 'in state ' + state)}"
    stack = _stack(info) if state in "RS" else ""
    return f"{text}; it stands at\n{stack}" if stack else text


def is_alive(info: ProcessInfo) -> bool:
    """Whether this very process (not a later one with its id) runs on this host; a zombie is dead."""
    state, start_ticks = _stat(info.pid)
    return state not in ("", "Z", "X") and start_ticks == info.start_ticks


def kill_with_children(info: ProcessInfo) -> None:
    """SIGKILL a worker of this host and the processes of its group, which may outlive it; no error if all are gone."""
    state, start_ticks = _stat(info.pid)
    if state and start_ticks != info.start_ticks:
        return
    try:
        if info.leads_group:
            os.killpg(info.pid, signal.SIGKILL)
        elif state:
            os.kill(info.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_gone(processes: Sequence[ProcessInfo], timeout_s: float) -> list[ProcessInfo]:
    """Wait for processes of this host to end; returns those that still live."""
    end_s = time.monotonic() + timeout_s
    living = [info for info in processes if is_alive(info)]
    while living and time.monotonic() < end_s:
        time.sleep(0.02)
        living = [info for info in living if is_alive(info)]
    return living


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process; ("", 0) if there is none, ("?", 0) where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _stat_without_proc(pid)
    return fields[0], int(fields[19])


def _stat_without_proc(pid: int) -> tuple[str, int]:
    if Path("/proc/self/stat").exists():
        return "", 0
    try:
        os.kill(pid, 0)
    except OSError:
        return "", 0
    return "?", 0


def _output_files() -> tuple[str, ...]:
    paths = []
    for descriptor in (1, 2):
        link = Path(f"/proc/self/fd/{descriptor}")
        if link.exists() and link.is_file():
            paths.append(os.readlink(link))
    return tuple(dict.fromkeys(paths))


def _last_lines(path: Path, num_lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip() and not line.startswith(":")][-num_lines:]


def _stack(info: ProcessInfo, timeout_s: float = 1.0, max_lines: int = 12) -> str:
    """The main thread's stack, asked of the process by signal and read from its log; empty if it does not tell."""
    if not info.logs or STACK_SIGNAL is None:
        return ""
    log = Path(info.logs[-1])
    try:
        before = log.stat().st_size
        os.kill(info.pid, STACK_SIGNAL)
        end_s = time.monotonic() + timeout_s
        while log.stat().st_size == before and time.monotonic() < end_s:
            time.sleep(0.02)
        time.sleep(0.02)
        with log.open("rb") as file:
            file.seek(before)
            lines = file.read(65536).decode(errors="replace").splitlines()
    except OSError:
        return ""
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0)
    return "\n".join(lines[start + 1 : start + 1 + max_lines])
