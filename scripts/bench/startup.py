"""How long starting takes: the configuration's import and the time to tell a wrong setting, as ratios.

Each figure is the least of several runs of a fresh process, taken in turns in the same minute with two yardsticks: an
empty Python (the limit) and `import torch` (what a job that imports first and checks later would cost).

    python scripts/bench/startup.py [--runs 7] [--json startup.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT, PEER = "python -c pass", "import torch"
TELL = "import sys; from rlsys.config import PPOConfig, main_config; main_config(sys.argv[1:], PPOConfig)"
COMMANDS: dict[str, tuple[str, ...]] = {
    LIMIT: ("-c", "pass"),
    PEER: ("-c", "import torch"),
    "import rlsys.config": ("-c", "import rlsys.config"),
    "tell an unknown key": ("-c", TELL, "data.train_batch_sise=4"),
    "tell a wrong value": ("-c", TELL, "data.train_batch_size=-4"),
    "print the plan (--dry-run)": ("-c", TELL, "--dry-run"),
}
EXIT_CODES = {"tell an unknown key": 2, "tell a wrong value": 2}


@dataclass(frozen=True)
class Figure:
    """Seconds of the quickest run."""

    name: str
    seconds: float


def fresh_process_s(name: str) -> float:
    """Seconds one fresh process takes, from spawning it to its exit."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *COMMANDS[name]], env=environment, capture_output=True, cwd=ROOT, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode != EXIT_CODES.get(name, 0):
        raise SystemExit(f"'{name}' ended with {done.returncode}:\n{done.stderr.decode()}")
    return seconds


def worker_start_s(num_workers: int) -> float | None:
    """Seconds until `num_workers` idle Ray workers answer their first call; None where this cannot be measured yet."""
    del num_workers
    return None


def measure(names: dict[str, Callable[[], float]], runs: int) -> list[Figure]:
    """The least seconds of each, all taken in turns so that a busy minute hits them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(runs):
        for name, run in names.items():
            seconds[name].append(run())
    return [Figure(name, min(taken)) for name, taken in seconds.items()]


def main() -> None:
    """Measure and print the table; --json keeps it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure({name: lambda name=name: fresh_process_s(name) for name in COMMANDS}, options.runs)
    for count in (1, 8):
        taken = worker_start_s(count)
        if taken is not None:
            figures.append(Figure(f"start {count} worker{'s' if count > 1 else ''}", taken))
    by_name = {figure.name: figure.seconds for figure in figures}
    print(f"{'':<28}{'seconds':>9}{'x ' + LIMIT:>18}{'x ' + PEER:>16}   (least of {options.runs} runs)")
    for figure in figures:
        ratios = f"{figure.seconds / by_name[LIMIT]:>18.2f}{figure.seconds / by_name[PEER]:>16.3f}"
        print(f"{figure.name:<28}{figure.seconds:>9.3f}{ratios}")
    if options.json:
        options.json.write_text(json.dumps(by_name, indent=2) + "\n")


if __name__ == "__main__":
    main()
