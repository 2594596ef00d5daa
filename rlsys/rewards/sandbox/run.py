"""Runs an untrusted program in a process with next to no rights and bounds all its resources.

Guaranteed (by the kernel, see jail.py), or the run is refused: no network; no processes beside its own; no files read
but the interpreter and system libraries; none written but in its own folder, which is removed; no metadata changed; no
signals to others; limits on time, CPU time, memory, file sizes, threads and output. Linux on x86_64 and aarch64.

Where the kernel offers namespaces ("isolation"), other files, processes and IPC objects cannot even be seen, and the
folder is a file system in memory of limited size; without them its size is looked at every CHECK_S seconds.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Literal

ExitStatus = Literal["exit", "failed", "time limit", "output limit", "disk limit", "thread limit"]
GUARANTEES = ("privileges", "files", "network", "processes")
ISOLATION = "isolation"
JAIL = Path(__file__).with_name("jail.py")
FORBIDDEN = json.loads(Path(__file__).with_name("forbidden_calls.json").read_text())
"""System calls and their numbers on x86_64 and aarch64, null where the architecture does not have them."""
ENVIRONMENT = json.loads(Path(__file__).with_name("environment.json").read_text())
REFUSAL = "rlsys-sandbox-refuses:"
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


def run_python(
    source: str, *, stdin: str = "", limits: SandboxLimits | None = None, require: Sequence[str] = GUARANTEES
) -> SandboxRun:
    """Run `source` by this interpreter with `stdin` as its input.

    `require` names the guarantees (GUARANTEES, ISOLATION) without which SandboxError is raised instead.
    """
    if unknown := set(require) - {*GUARANTEES, ISOLATION}:
        raise ValueError(f"require={sorted(unknown)}: the guarantees are {', '.join((*GUARANTEES, ISOLATION))}")
    if sys.platform != "linux":
        raise SandboxError("programs are graded on Linux only: no other kernel restricts them as required")
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory(prefix="rlsys-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "main.py").write_text(source, encoding="utf-8", errors="surrogatepass")
        run = _watched(_spec(folder, limits, require), stdin, folder, limits)
    if run.status == "failed" and run.stderr.startswith(REFUSAL):
        lacking = run.stderr.removeprefix(REFUSAL)
        raise SandboxError(f"code is not run: this kernel or container cannot restrict {lacking} (Landlock, seccomp)")
    return run


def available_guarantees() -> tuple[str, ...]:
    """What this machine can guarantee, tried out."""
    return tuple(g for g in (*GUARANTEES, ISOLATION) if _holds(g))


def _holds(guarantee: str) -> bool:
    with suppress(SandboxError):
        return run_python("", require=[guarantee]).status == "exit"
    return False


def _spec(folder: Path, limits: SandboxLimits, require: Sequence[str]) -> dict[str, object]:
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent))
    environment = {
        **ENVIRONMENT,
        **dict.fromkeys(("HOME", "TMPDIR"), str(folder)),
        "PYTHONPATH": os.pathsep.join(filter(None, libraries)),
    }
    return {
        "parent": os.getpid(),
        "folder": str(folder),
        "folder_bytes": limits.folder_bytes,
        "readable": [p for p in dict.fromkeys((*prefixes, *SYSTEM_PATHS)) if p != "/"],
        "require": list(require),
        "refusal": REFUSAL,
        "forbidden": list(FORBIDDEN.values()),
        "command": [sys.executable, "-S", "-s", "-P", str(folder / "main.py")],
        "environment": environment,
        "limits": {
            "RLIMIT_CPU": max(1, int(-(-limits.cpu_s // 1))),
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": limits.num_files,
            **dict.fromkeys(("RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE"), 0),
        },
    }


def _watched(spec: Mapping[str, object], stdin: str, folder: Path, limits: SandboxLimits) -> SandboxRun:
    start = time.monotonic()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode("utf-8", errors="surrogatepass"))
        given.seek(0)
        command = [sys.executable, "-I", "-S", str(JAIL), json.dumps(spec)]
        process = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, env={}, start_new_session=True)
        status: ExitStatus | None = None
        while status is None and process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(CHECK_S)
            if max(os.fstat(file.fileno()).st_size for file in (out, err)) > limits.output_bytes:
                status = "output limit"
            elif process.returncode is None and time.monotonic() - start > limits.wall_s:
                status = "time limit"
            elif _folder_bytes(folder) > limits.folder_bytes:
                status = "disk limit"
            elif len(glob(f"/proc/{process.pid}/task/*")) > limits.num_threads:
                status = "thread limit"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.returncode == -signal.SIGXCPU:
            status = "time limit"
        stdout, stderr = (os.pread(f.fileno(), limits.output_bytes, 0).decode("utf-8", "replace") for f in (out, err))
    return SandboxRun(status or ("failed" if process.returncode else "exit"), stdout, stderr)


def _folder_bytes(folder: Path) -> int:
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
