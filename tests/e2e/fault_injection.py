"""Signals that a driver under test sends to its Ray workers, each at a stage or in the middle of a worker's call."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from tests.e2e.fork_server import wrap

UNDER_WAY_S = 0.3
PAUSE_S = 3
HEAD_PID = "HEAD_PID"
TITLE = re.compile(r"ray::Colocated_([a-z_]+)")


@dataclass(frozen=True)
class Fault:
    """SIG`signal` to the process that plays `role` when `at` is entered for the `entry`-th time.

    `at` is a stage of the controller ("adv"), or a call of a worker ("critic.update_critic"): a SIGKILL then comes
    when the call has been sent and the worker cannot have answered. `rank` counts the processes of that role in
    the order of their start, which need not be that of their ranks. A driver that is stopped continues after PAUSE_S.
    """

    role: str
    at: str
    signal: str = "KILL"
    entry: int = 1
    rank: int = 0


def inject_faults(faults: Sequence[Fault]) -> None:
    """Make this process, the driver, send the signals."""
    entered: dict[str, int] = {}

    def due(at: str) -> list[Fault]:
        entered[at] = entered.get(at, 0) + 1
        return [fault for fault in faults if fault.at == at and fault.entry == entered[at]]

    def stages(original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def call(timer: Any, stage: str) -> Iterator[None]:
            with original(timer, stage):
                for fault in due(stage):
                    _send(fault, _process(fault), fault.signal)
                yield

        return call

    def calls(original: Callable[..., Any]) -> Callable[..., Any]:
        def submit(backend: Any, calls: Any) -> Any:
            spec = calls[0][1]
            targets = [(fault, _process(fault)) for fault in due(f"{spec.role}.{spec.method}")]
            for fault, process in targets:
                _send(fault, process, "KILL" if fault.role == "driver" else "STOP")
            sent = original(backend, calls)
            for fault, process in targets:
                if fault.signal == "KILL":
                    threading.Thread(target=_later, args=(process,)).start()
            return sent

        return submit

    wrap("rlsys.telemetry.metrics:StageTimer.__call__", stages)
    wrap("rlsys.single_controller.ray.backend:RayBackend.submit", calls)


def workers(head_pid: int) -> list[tuple[list[str], psutil.Process]]:
    """The workers below a head, oldest first, with the roles they play."""
    processes = []
    for one in psutil.Process(head_pid).children(recursive=True):
        try:
            title = TITLE.match(" ".join(one.cmdline()))
            if title:
                processes.append((title[1].split("_"), one, one.create_time()))
        except psutil.Error:
            continue
    return [(roles, one) for roles, one, _ in sorted(processes, key=lambda item: item[2])]


def _process(fault: Fault) -> psutil.Process:
    if fault.role == "driver":
        return psutil.Process()
    playing = [one for roles, one in workers(int(os.environ[HEAD_PID])) if fault.role in roles]
    assert fault.rank < len(playing), f"no process for {fault}"
    return playing[fault.rank]


def _send(fault: Fault, process: psutil.Process, name: str) -> None:
    print(f"injected: {time.monotonic():.1f} {fault}", file=sys.stderr, flush=True)
    if fault.role == "driver" and name == "STOP":
        subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
    process.send_signal(getattr(signal, f"SIG{name}"))


def _later(process: psutil.Process) -> None:
    time.sleep(UNDER_WAY_S)
    process.kill()
