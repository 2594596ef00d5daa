"""A small process that outlives its driver just long enough to end the processes that the driver could not.

When a driver dies by SIGKILL, Ray's servers follow it, some after minutes; children of workers, and workers that are
stopped, do not. The guard then kills all processes of the cluster: those that started with its mark in their
environment and those that Ray gave a title (which overwrites the environment) and that have the cluster's logs open,
or were seen without it while the cluster started.
"""

import contextlib
import os
import select
import subprocess
import sys
import time

import psutil

MARK = "RLSYS_CLUSTER_MARK"
POLL_S = 0.5


class Guard:
    """The driver's side of it; made before the cluster, whose log directory is added by `watch`."""

    def __init__(self, mark: str) -> None:
        command, quiet = [sys.executable, "-I", __file__, str(os.getpid()), mark], subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, start_new_session=True)

    def watch(self, log_dir: str) -> None:
        """Recognise the processes that have files of this directory open."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{log_dir}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Make it kill what is left of the cluster, and exit."""
        self._process.communicate(b"end\n", timeout=60.0)


def _belongs(process: psutil.Process, mark: str, log_dir: str) -> bool:
    """Whether a process is of the cluster, as far as this user may inspect it."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.environ().get(MARK) == mark:
            return True
        is_titled = "".join(process.cmdline()).startswith("ray::")
        return is_titled and bool(log_dir) and any(file.path.startswith(log_dir) for file in process.open_files())
    return False


def main(driver_pid: int, mark: str) -> None:
    """Wait until the driver asks for it or is gone, then kill.

    The driver writes the log directory on a line (an absolute path), and another line or the end of file to ask for it.
    """
    log_dir, early = "", set[psutil.Process]()
    line = "/"
    while line.startswith("/"):
        if not log_dir:
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(driver_pid).children(recursive=True)
                early.update(p for p in children if _belongs(p, mark, log_dir))
        if select.select([0], [], [], POLL_S)[0]:
            line = sys.stdin.readline().strip()
            log_dir = line if line.startswith("/") else log_dir
        elif os.getppid() != driver_pid:
            break
    for _ in range(3):
        left = {p for p in psutil.process_iter() if p.pid != os.getpid() and _belongs(p, mark, log_dir)}
        for process in left | early:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
