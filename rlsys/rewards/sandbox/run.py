"""Runs an untrusted program in a process with next to no rights and bounds all its resources.

Guaranteed (by the kernel, see jail.py), or the run is refused: no network; no processes beside its own; no files read
but the interpreter and system libraries; none written but in its own folder, which is removed; no signals to others;
limits on time, CPU time, memory, file sizes, folder size, threads and output. Linux on x86_64 and aarch64.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

ExitStatus = Literal["exit", "failed", "timeout", "output", "folder", "threads"]
GUARANTEES = ("privileges", "files", "network", "processes")
JAIL = Path(__file__).with_name("jail.py")
REFUSAL, REFUSAL_CODE = "rlsys-sandbox-refuses:", 97
CHECK_S = 0.05
SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")


class SandboxError(RuntimeError):
    """This machine cannot give the guarantees that were required; nothing was run."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may use. `cpu_s` is rounded up to whole seconds by the kernel."""

    wall_s: float = 4.0
    cpu_s: float = 4.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    file_bytes: int = 8 << 20
    folder_bytes: int = 32 << 20
    num_files: int = 64
    num_threads: int = 64


@dataclass(frozen=True)
class SandboxRun:
    """How a run ended. `stdout` and `stderr` are cut at the limit; `status` "exit" means with code 0."""

    status: ExitStatus
    stdout: str
    stderr: str
    seconds: float


def run_python(
    source: str, *, stdin: str = "", limits: SandboxLimits | None = None, require: Sequence[str] = GUARANTEES
) -> SandboxRun:
    """Run `source` by this interpreter with `stdin` as its input.

    `require` names the guarantees (GUARANTEES) without which SandboxError is raised instead.
    """
    if unknown := set(require) - set(GUARANTEES):
        raise ValueError(f"require={sorted(unknown)}: the guarantees are {', '.join(GUARANTEES)}")
    limits = limits or SandboxLimits()
    folder = Path(tempfile.mkdtemp(prefix="rlsys-run-"))
    try:
        (folder / "main.py").write_text(source, encoding="utf-8", errors="surrogatepass")
        run = _watched(_spec(folder, limits, require), stdin, folder, limits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if run.status == "failed" and run.stderr.startswith(REFUSAL):
        lacking = run.stderr.removeprefix(REFUSAL)
        raise SandboxError(f"code is not run: this kernel or container cannot restrict {lacking} (Landlock, seccomp)")
    return run


def available_guarantees() -> tuple[str, ...]:
    """What this machine can guarantee, tried out."""
    return tuple(g for g in GUARANTEES if _holds(g))


def _holds(guarantee: str) -> bool:
    try:
        return run_python("", require=[guarantee]).status == "exit"
    except SandboxError:
        return False


def _spec(folder: Path, limits: SandboxLimits, require: Sequence[str]) -> dict[str, Any]:
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8:surrogateescape",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    cpu_s = max(1, int(-(-limits.cpu_s // 1)))
    return {
        "parent": os.getpid(),
        "folder": str(folder),
        "readable": [p for p in dict.fromkeys((*prefixes, *SYSTEM_PATHS)) if p != "/"],
        "require": list(require),
        "refusal": REFUSAL,
        "refusal_code": REFUSAL_CODE,
        "command": [sys.executable, "-S", "-s", "-P", str(folder / "main.py")],
        "environment": environment,
        "limits": {
            "RLIMIT_CPU": cpu_s,
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": limits.num_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        },
    }


def _watched(spec: Mapping[str, Any], stdin: str, folder: Path, limits: SandboxLimits) -> SandboxRun:
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(JAIL), json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    pipes = _Pipes(process, stdin.encode("utf-8", errors="surrogatepass"), limits.output_bytes)
    status: ExitStatus | None = None
    while status is None and process.poll() is None:
        if not pipes.move(CHECK_S):
            time.sleep(CHECK_S / 10)
        if time.monotonic() - start > limits.wall_s:
            status = "timeout"
        elif pipes.num_bytes_over > 0:
            status = "output"
        elif _folder_bytes(folder) > limits.folder_bytes:
            status = "folder"
        elif _num_threads(process.pid) > limits.num_threads:
            status = "threads"
    while status is None and pipes.move(0.0):
        status = "output" if pipes.num_bytes_over > 0 else None
    status = status or ("exit" if process.returncode == 0 else "failed")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    pipes.close()
    if process.returncode == -signal.SIGXCPU:
        status = "timeout"
    out, err = (data.decode("utf-8", errors="replace") for data in (pipes.stdout, pipes.stderr))
    return SandboxRun(status, out, err, time.monotonic() - start)


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _folder_bytes(folder: Path) -> int:
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class _Pipes:
    """Feeds the program's input and collects its output without ever waiting for it."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, max_bytes: int) -> None:
        self._stdin, self._out, self._err = (_opened(p) for p in (process.stdin, process.stdout, process.stderr))
        self._left, self._max_bytes = memoryview(stdin), max_bytes
        self.stdout, self.stderr = bytearray(), bytearray()
        self.num_bytes_over = 0
        self._selector = selectors.DefaultSelector()
        for pipe, event in ((self._stdin, 2), (self._out, 1), (self._err, 1)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, event)

    def move(self, seconds: float) -> bool:
        """Move what can be moved; False when the program has closed its output."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._stdin:
                self._write()
            else:
                self._read(key.fileobj)
        return any(key.fileobj is not self._stdin for key in self._selector.get_map().values())

    def _write(self) -> None:
        try:
            self._left = self._left[os.write(self._stdin.fileno(), self._left[: 1 << 16]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = self._left[:0]
        if not self._left:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self, pipe: Any) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(pipe)
            return
        into = self.stdout if pipe is self._out else self.stderr
        room = self._max_bytes - len(into)
        into += data[:room]
        self.num_bytes_over += max(0, len(data) - room)

    def close(self) -> None:
        self._selector.close()
        for pipe in (self._stdin, self._out, self._err):
            pipe.close()
