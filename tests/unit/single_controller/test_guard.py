"""The guard kills what a driver leaves behind, and nothing else."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.timing import scaled_s, wait_until

ROOT = Path(__file__).resolve().parents[3]
DRIVER = textwrap.dedent(
    """
    import os, subprocess, sys, time
    from rlsys.single_controller.guard import MARK, Guard
    log = open(sys.argv[1] + "/worker.out", "w")
    marked = subprocess.Popen(["sleep", "100"], env={MARK: sys.argv[1]}, start_new_session=True)
    titled = ["ray::Sleeper", "100"]
    logging = subprocess.Popen(titled, executable="/bin/sleep", env={MARK: "other"}, pass_fds=[log.fileno()])
    null = subprocess.DEVNULL
    other = subprocess.Popen(["sleep", "100"], env={MARK: "other"}, pass_fds=[log.fileno()], stdout=null)
    guard = Guard(sys.argv[1])
    guard.watch(sys.argv[1])
    print(marked.pid, logging.pid, other.pid, flush=True)
    sys.stdin.readline()
    guard.close()
    """
)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_guard_kills_the_cluster_and_no_other_process(tmp_path: Path, end: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    marked, logging, other = (int(pid) for pid in driver.stdout.readline().split())
    try:
        assert _runs(marked)
        assert _runs(logging)
        if end == "killed":
            driver.send_signal(signal.SIGKILL)
        else:
            driver.stdin.write("\n")
            driver.stdin.flush()
        driver.wait(scaled_s(20))
        wait_until(lambda: not (_runs(marked) or _runs(logging)))
        assert not _runs(marked)
        assert not _runs(logging)
        assert _runs(other)
    finally:
        subprocess.run(["kill", "-9", str(other)], check=False)
