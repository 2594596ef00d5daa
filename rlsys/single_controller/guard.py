"""A small process that outlives its driver just long enough to end what the driver could not.

When a driver dies by SIGKILL, Ray's servers follow it, some after minutes; children of workers, and workers that are
stopped, do not. The guard then kills all processes of the cluster: those that were born with its mark in their
environment and those that Ray gave a title (which overwrites the environment) and that have the cluster's logs open.
It looks in /proc; without one it does nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "RLSYS_CLUSTER_MARK"
LOOK_EVERY_S = 0.5
NUM_ROUNDS = 3


class Guard:
    """The driver's side of it."""

    def __init__(self, mark: str, log_dir: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark, log_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Let it end what is left of the cluster, and itself."""
        self._process.communicate(b"end\n", timeout=10.0)


def cluster_processes(mark: str, log_dir: str) -> Iterator[int]:
    """The processes of a cluster on this host, as far as this user may look at them."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _belongs(entry, mark, log_dir):
            yield int(entry.name)


def _belongs(entry: Path, mark: str, log_dir: str) -> bool:
    try:
        if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
            return True
        if not (entry / "cmdline").read_bytes().startswith(b"ray::"):
            return False
        return any(os.readlink(descriptor).startswith(log_dir) for descriptor in (entry / "fd").iterdir())
    except OSError:
        return False


def main(driver_pid: int, mark: str, log_dir: str) -> None:
    """Wait until the driver says so or is gone, then kill."""
    while os.getppid() == driver_pid and not select.select([0], [], [], LOOK_EVERY_S)[0]:
        pass
    for _ in range(NUM_ROUNDS if Path("/proc/self/environ").exists() else 0):
        for pid in cluster_processes(mark, log_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
