"""A rollout engine from a module of the user's own trains like a built-in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy
from trainer.main_ppo import main

PLUGIN = """
from rlsys.config.engines import RolloutBackend, register_rollout_backend
from rlsys.rollout.hf.engine import HFRollout
from workers.rollout import RolloutWorker


class ToyRollout(HFRollout):
    pass


class ToyRolloutWorker(RolloutWorker):
    def build_engine(self, path, context):
        return ToyRollout.from_path(path, self.cfg, context)


register_rollout_backend(RolloutBackend("toy", "toy_engine:ToyRolloutWorker"))
"""


def test_a_registered_engine_trains_a_step(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_engine.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    engine = ("actor_rollout_ref.rollout.name=toy", "actor_rollout_ref.model.external_lib=toy_engine")
    assert main(toy.overrides(out, "trainer.backend=local", "trainer.total_training_steps=1", *engine)) == 0
    (line,) = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert line["rollout/answered"] > 0
    assert line["training/rollout_probs_diff_max"] < 1e-5
