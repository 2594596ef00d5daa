"""Beside the command line: a notebook on a running Ray head with token authentication."""

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import nbformat
import pytest
from nbclient import NotebookClient

from rlsys.config import load_config
from tests.e2e.conftest import Toy
from tests.e2e.ray_head import ROOT, Head
from tests.timing import scaled_s
from trainer.build import build_trainer
from trainer.ppo import RayPPOTrainer


def test_the_notebook_steps_a_trainer_on_a_running_head(
    head: Head, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (head.env | {"PYTHONPATH": str(ROOT)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PPO_BY_HAND", " ".join(toy.overrides(tmp_path / "out", "trainer.total_training_steps=2")))
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "ppo_by_hand.ipynb", as_version=4)
    done = NotebookClient(notebook, timeout=int(scaled_s(240)), kernel_name="python3").execute(cwd=str(tmp_path))
    assert "responses" in str(done.cells)
    assert (tmp_path / "out" / "global_step_2" / "trainer.json").exists()
    (start,) = (tmp_path / "out" / "starts.jsonl").read_text().splitlines()
    assert "ipykernel" in json.loads(start)["command"]
    assert "all defaults filled in" in (tmp_path / "out" / "config.yaml").read_text()
    assert "loading the model" in (tmp_path / "out" / "train.log").read_text()


class Interrupted(RayPPOTrainer):
    """Notes the steps that it finishes, and is interrupted after the first of them."""

    steps: ClassVar[list[int]] = []

    def finish_step(self) -> None:
        super().finish_step()
        self.steps.append(self.global_step)
        if len(self.steps) == 1:
            raise KeyboardInterrupt


def test_fit_runs_again_in_the_same_kernel(toy: Toy, tmp_path: Path) -> None:
    """Where no checkpoint was written before the interrupt it starts at step 1, as its workers do; else it resumes."""
    small = ("trainer.backend=local", "actor_rollout_ref.model.path=null", "data.train_files=null")
    first, longer = (
        load_config(toy.overrides(tmp_path / "out", *small, f"trainer.total_training_steps={steps}"))
        for steps in (2, 3)
    )
    trainer = build_trainer(first, trainer_cls=Interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    trainer.fit()
    trainer.fit()
    build_trainer(longer, trainer_cls=Interrupted).fit()
    assert Interrupted.steps == [1, 1, 2, 3]
    assert not list((tmp_path / "out").glob("metrics.2.jsonl"))


DRY_RUNS = """
from rlsys.config import load_config
from rlsys.utils.errors import ConfigError
from trainer.machine import check_machine
for num_nodes in (1, 2):
    try:
        print(check_machine(load_config(["trainer.n_gpus_per_node=4", f"trainer.nnodes={num_nodes}"]), dry_run=True))
    except ConfigError as error:
        print(error)
"""


def test_a_dry_run_asks_the_cluster_that_it_would_join(head: Head) -> None:
    command, env = [sys.executable, "-c", DRY_RUNS], head.env | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled_s(60), check=True)
    fits, too_large = ended.stdout.splitlines()
    assert fits == "[]"
    assert too_large.startswith(
        "no node has room for 4 process(es) of pool 'train' with 4 CPUs and 0 GPUs: "
        "left are 0 CPUs and 0 GPUs on 1 node(s); the cluster has 4 CPUs and 0 GPUs on 1 node(s) "
        "(at most 4 and 0 on one), the plan needs 8 CPUs"
    )
