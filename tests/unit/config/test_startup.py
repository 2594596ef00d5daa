"""A wrong setting is reported at once: nothing heavy is imported, and nothing is started."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "ray", "numpy", "tensordict", "transformers", "pyarrow", "datasets", "rich")
MAX_SHARE = 0.5
"""Of the CPU time of `import torch`, which other work on the machine prolongs likewise."""

CODE = f"""
import sys
from rlsys.config import PPOConfig, main_config
try:
    main_config(sys.argv[1:], PPOConfig)
finally:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print("HEAVY", heavy, file=sys.stderr)
"""


def run(*argv: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The outcome of a process and the CPU seconds it took (wall time would measure the neighbours too)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=scaled_s(60),
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def torch_s() -> float:
    """CPU seconds of importing torch."""
    return run("-c", "import torch")[1]


@pytest.mark.parametrize("argument", ["data.sed=1", "trainer.nnodes=0", "--config-nam=x", "trainer.max_staleness=1"])
def test_a_wrong_setting_is_reported_soon_and_without_heavy_imports(argument: str, torch_s: float) -> None:
    done, seconds = run("-c", CODE, argument)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "HEAVY []" in done.stderr
    assert "Traceback" not in done.stderr
    assert seconds <= MAX_SHARE * torch_s


def test_a_right_setting_needs_nothing_heavy_either() -> None:
    done, _ = run("-c", CODE, "--dry-run")
    assert done.returncode == 0
    assert "HEAVY []" in done.stderr


def test_help_may_be_cut_off_by_its_reader() -> None:
    command = f"{sys.executable} -c '{CODE.replace(chr(39), chr(34))}' --help | head -n 1"
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=scaled_s(60),
        check=True,
    )
    assert done.stdout.startswith("trainer.main_ppo")
    assert "Error" not in done.stderr


@pytest.mark.parametrize("program", ["main_ppo", "main_sft", "main_rm", "main_dpo", "main_eval"])
def test_every_job_reports_a_wrong_setting_soon(program: str, torch_s: float) -> None:
    done, seconds = run("-X", "importtime", "-m", f"trainer.{program}", "no.such.key=1")
    assert done.returncode == 2
    assert "no.such.key" in done.stderr
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert not [name for name in imported if name in ("torch", "ray") or name.startswith("rlsys.planning")]
    assert seconds <= MAX_SHARE * torch_s
