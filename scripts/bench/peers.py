"""The peers that benchmarks compare with, each in an environment of its own under ~/.cache/rlsys."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VERL_VERSION = "0.9.1"
TORCH_VERSION = "2.13.0"


def verl_python() -> Path:
    """The interpreter of an environment with verl, installed on first use (a few minutes, needs a package index)."""
    home = Path(os.environ.get("RLSYS_CACHE", Path.home() / ".cache" / "rlsys")) / "bench-verl"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        print(f"installing verl {VERL_VERSION} into {home} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        for wanted in (f"torch=={TORCH_VERSION}", f"verl=={VERL_VERSION}"):
            subprocess.run([str(python), "-m", "pip", "install", "-q", wanted], check=True, stdout=sys.stderr)
        (home / "complete").touch()
    return python


def python_path() -> str:
    """This checkout before what the environment names."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def start_side(command: Sequence[str], extra: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """One side of a benchmark in its own process, single-threaded, talking over its standard input and output."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **(extra or {})}
    with tempfile.NamedTemporaryFile("w", prefix="rlsys-bench-", suffix=".log", delete=False) as log:
        print(f"{' '.join(command)} > {log.name}", file=sys.stderr)
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )


def measure(python: Path | str, script: Path | str, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run one side of a benchmark to its end; its last line of output is its result as JSON."""
    process = start_side([str(python), str(script), *arguments])
    output, _ = process.communicate(timeout=timeout_s)
    if process.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed with status {process.returncode}:\n{output[-4000:]}")
    return json.loads(output.strip().splitlines()[-1])


def machine() -> str:
    """Processor, cores and memory of this machine, for the record."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"
