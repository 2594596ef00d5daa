"""The wheel of this package, installed into an empty environment, trains from any folder.

`scripts/test.sh -m wheels tests/wheels/test_own_wheel.py`; pip installs torch and the rest, so it takes minutes.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wheels, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would hide the wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(".*", "build", "outputs", "site"))
    built = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source)]
    subprocess.run(built, check=True, timeout=600)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    (wheel,) = folder.glob("rlsys-*.whl")
    locked = ["-c", str(ROOT / "requirements/cpu.txt"), "torch", str(wheel)]
    subprocess.run([python, "-m", "pip", "install", "-q", *locked], env=ENVIRONMENT, check=True, timeout=1500)
    return python


def rlsys(python: Path, folder: Path, *arguments: str) -> str:
    command = [str(python.with_name("rlsys")), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_command_of_the_readme_trains(python: Path, tmp_path: Path) -> None:
    shown = rlsys(python, tmp_path, "train", "trainer.total_training_steps=2", "trainer.default_local_dir=run")
    assert "2/2" in shown
    assert (tmp_path / "run/config.yaml").is_file()
    merged = rlsys(python, tmp_path, "merge", "--local_dir", "run", "--target_dir", "model")
    assert (tmp_path / "model/model.safetensors").is_file(), merged


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("--version",), "rlsys 0."),
        (("plan", "7B", "FSDP8", "TP2xDP4"), "FSDP8"),
        (("doctor",), "torch"),
        (("prepare-data", "--help"), "--task"),
        (("train", "--config-name=quickstart", "--dry-run"), "nothing was started"),
    ],
)
def test_commands_of_the_wheel(python: Path, tmp_path: Path, arguments: tuple[str, ...], printed: str) -> None:
    assert printed in rlsys(python, tmp_path, *arguments)
