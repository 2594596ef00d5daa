"""The rlsys command."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.timing import scaled_s

ROOT = Path(__file__).resolve().parents[2]


def rlsys(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlsys", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled_s(60), check=False
    )


def test_folders_that_do_not_suit_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    written = rlsys("prepare-data", "--task=gcd", "--train=2", "--val=2", "--out=file", folder=tmp_path)
    assert (written.returncode, written.stderr) == (2, "[Errno 17] File exists: 'file'\n")
    reported = rlsys("report", ".", folder=tmp_path)
    assert (reported.returncode, reported.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "index.html").exists()


def test_python_without_docstrings_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-OO", "-m", "rlsys", "train", "--config-name=quickstart", "--dry-run"]
    done = subprocess.run(
        command,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled_s(60),
    )
    assert (done.returncode, "PYTHONOPTIMIZE=2 removes docstrings" in done.stderr) == (2, True), done.stderr


INTERRUPTED = """
import os, runpy, signal, sys
sys.argv = ["/usr/bin/rlsys", "train"]
signal.signal(signal.SIGINT, signal.default_int_handler)
from rlsys.__main__ import main
runpy.run_module = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
main()
"""


def test_ctrl_c_while_a_command_is_imported_is_one_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=scaled_s(30), cwd=ROOT
    )
    assert (ended.returncode, ended.stderr) == (-2, "rlsys: interrupted (Ctrl-C)\n")


def test_a_python_without_our_packages_is_one_line() -> None:
    code = "import sys; sys.argv = ['-m']; sys.modules['pydantic'] = None; import trainer.main_ppo"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled_s(30), cwd=ROOT)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "pydantic" in ended.stderr
    assert "activate the environment (. .venv/bin/activate)" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        ((), 0, "train        PPO, GRPO"),
        (("--version",), 0, "rlsys 0."),
        (("nope",), 2, "rlsys: nope is not a command"),
        (("train", "--config-name=quickstart", "--dry-run"), 0, "--dry-run: nothing was started"),
        (("sft", "no.such.key=1"), 2, "no.such.key"),
        (("reward-test", "none.py", "none.jsonl"), 2, "none.jsonl"),
        (("merge", "--help"), 0, "--local_dir DIR"),
    ],
)
def test_a_command_runs_also_beside_modules_named_like_ours(
    tmp_path: Path, arguments: tuple[str, ...], code: int, printed: str
) -> None:
    for name in ("trainer", "workers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')")
    done = rlsys(*arguments, folder=tmp_path)
    assert (done.returncode, printed in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


def test_an_older_python_is_refused_in_one_line() -> None:
    code = "import sys; sys.version_info = (3, 10, 13); import rlsys"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled_s(30), cwd=ROOT)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "is too old; install Python 3.11 or later" in ended.stderr


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "index.html" / "sub").mkdir(parents=True)
    ended = rlsys("report", ".", folder=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("rlsys report: [Errno 21] Is a directory")
    assert ended.stderr.count("\n") == 1
