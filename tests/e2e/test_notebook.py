"""Beside the command line: a notebook on a running Ray head with token authentication."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.conftest import Toy

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """A Ray head on loopback that asks for a token; yields the environment of its clients."""
    folder = tmp_path_factory.mktemp("ray", numbered=True)
    gcs, dashboard, agent = free_port(), free_port(), free_port()
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }
    command = [RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}", "--num-cpus=4"]
    command += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
    command += [f"--dashboard-agent-listen-port={agent}"]
    with (folder / "head.log").open("w") as log:
        running = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield {**env, "RAY_ADDRESS": f"127.0.0.1:{gcs}", "DASHBOARD": f"http://127.0.0.1:{dashboard}"}
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


@pytest.mark.slow
def test_the_notebook_steps_a_trainer_on_a_running_head(
    head: Mapping[str, str], toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in head.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PPO_BY_HAND", " ".join(toy.overrides(tmp_path / "out", "trainer.total_training_steps=2")))
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "ppo_by_hand.ipynb", as_version=4)
    done = NotebookClient(notebook, timeout=240, kernel_name="python3").execute(cwd=str(tmp_path))
    assert "responses" in str(done.cells)
    assert (tmp_path / "out" / "global_step_2" / "trainer.json").exists()
