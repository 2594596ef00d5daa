"""Code of `actor_rollout_ref.model.external_lib`: an engine trains like a built-in one, and errors name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Toy
from trainer.main_ppo import main

ENGINE = """
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
ENGINE_KEY, LIBRARY_KEY = "actor_rollout_ref.rollout.name", "actor_rollout_ref.model.external_lib"


def test_a_registered_engine_trains_a_step(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    engine = (f"{ENGINE_KEY}=toy", f"{LIBRARY_KEY}=toy_engine")
    assert main(toy.overrides(out, "trainer.backend=local", "trainer.total_training_steps=1", *engine)) == 0
    line = json.loads((out / "metrics.jsonl").read_text())
    assert line["rollout/answered"] > 0
    assert line["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.parametrize("name", ["broken.py", "broken"])
def test_a_library_that_cannot_be_imported_names_its_key(
    toy: Toy, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    library = str(tmp_path / name) if name.endswith(".py") else name
    assert main(toy.overrides(tmp_path / "out", "trainer.backend=local", f"{LIBRARY_KEY}={library}")) != 0
    error = capsys.readouterr().err
    assert f"{LIBRARY_KEY}={library}" in error
    assert "RuntimeError: no licence" in error
