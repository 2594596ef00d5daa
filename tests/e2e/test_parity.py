"""The parity probe in whole runs: it finds what is wrong, costs nothing that matters and changes nothing."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.config import load_config
from rlsys.rollout.hf.engine import HFRollout
from rlsys.utils.errors import FailedWorker, RolloutError, WorkerError
from tests.e2e.conftest import Toy
from tests.e2e.test_main_ppo import CORRUPTED, LOCAL, metrics_of, weights_of
from trainer.build import build_trainer
from trainer.main_ppo import main

PARITY = "actor_rollout_ref.rollout.parity"
VALUES = {f"parity/{prefix}{name}" for prefix in ("", "sampled_") for name in ("mean_abs", "max_abs", "k3")}


def bent(monkeypatch: pytest.MonkeyPatch, *, version: int) -> None:
    """From this version on the rollout serves one wrong matrix."""
    finish = HFRollout.finish_update

    def corrupted(engine: HFRollout, pushed: int) -> None:
        if pushed >= version:
            engine.local_tensors()[CORRUPTED].mul_(-20)
        finish(engine, pushed)

    monkeypatch.setattr(HFRollout, "finish_update", corrupted)


def test_actor_and_rollout_agree_and_nothing_else_changes(toy: Toy, tmp_path: Path) -> None:
    probed, plain = tmp_path / "probed", tmp_path / "plain"
    save = "trainer.save_freq=3"
    assert main(toy.overrides(probed, LOCAL, save, f"{PARITY}.freq=2")) == 0
    assert main(toy.overrides(plain, LOCAL, save, f"{PARITY}.freq=-1")) == 0
    lines = metrics_of(probed)
    assert [line.keys() >= VALUES for line in lines] == [True, True, False]
    for line in lines[:2]:
        assert line["parity/skipped"] == line["parity/alarm"] == 0
        assert 4 <= line["parity/num_tokens"] <= 16
        assert all(line[name] < 1e-4 for name in VALUES)
    without = [{k: v for k, v in line.items() if not k.startswith("parity/")} for line in lines]
    assert without == metrics_of(plain)
    ours, theirs = weights_of(probed, 3), weights_of(plain, 3)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_wrong_weights_stop_the_run_and_the_worst_token_is_named(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bent(monkeypatch, version=2)
    limits = (f"{PARITY}.freq=1", f"{PARITY}.mean_limit=0.001", f"{PARITY}.policy=stop")
    assert main(toy.overrides(tmp_path / "out", LOCAL, *limits)) == 1
    printed = capfd.readouterr().err
    assert "ParityError: actor and rollout disagree on the same" in printed
    assert "under weights 2 when it scores them" in printed
    assert "under weights 2 when it sampled them" in printed
    assert "worst: row " in printed
    assert "validate_weight=true" in printed
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == [1]


def test_by_default_a_wrong_rollout_is_warned_of(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bent(monkeypatch, version=0)
    run = (LOCAL, "trainer.total_training_steps=1", f"{PARITY}.mean_limit=0.001")
    assert main(toy.overrides(tmp_path / "out", *run)) == 0
    (line,) = metrics_of(tmp_path / "out")
    assert line["parity/alarm"] == 1
    assert line["parity/mean_abs"] > 0.001
    assert "actor and rollout disagree" in capfd.readouterr().err


def test_it_is_taken_on_demand_and_needs_equal_weights(toy: Toy, tmp_path: Path) -> None:
    overrides = toy.overrides(
        tmp_path / "out", LOCAL, "trainer.sync_freq=5", "trainer.max_staleness=4", f"{PARITY}.freq=-1"
    )
    trainer = build_trainer(load_config(overrides))
    with closing(trainer):
        trainer.init_workers()
        trainer.push_weights()
        report = trainer.parity_probe()
        assert report.problem == ""
        assert report.scored is not None
        assert report.scored.max_abs < 1e-4
        trainer.step(trainer.next_batch())
        with pytest.raises(RolloutError, match="call push_weights"):
            trainer.parity_probe()
        trainer.push_weights()
        again = trainer.parity_probe()
        assert again.scored is not None
        assert again.scored.trainer != report.scored.trainer


class Servers:
    """A rollout that completes but does not score."""

    asked = 0

    def compute_log_prob(self, data: Any) -> Any:
        self.asked += 1
        raise ValueError("servers score given tokens at temperature 1 only")


def test_a_rollout_that_cannot_score_is_asked_once(toy: Toy, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = build_trainer(load_config(toy.overrides(tmp_path / "out", LOCAL)))
    with closing(trainer):
        trainer.init_workers()
        trainer.push_weights()
        servers = Servers()
        probe = replace(trainer.parts.parity, score=servers.compute_log_prob)
        before = torch.get_rng_state()
        reports = [probe.run(0), probe.run(0)]
        assert torch.equal(before, torch.get_rng_state())
        assert servers.asked == 1
        assert [report.metrics()["parity/skipped"] for report in reports] == [1, 1]
        assert all(report.scored is None and report.sampled.max_abs < 1e-4 for report in reports)


@dataclass
class LostOnce:
    """A rollout whose worker dies in the first probe and is replaced."""

    score: Any
    is_lost: bool = False

    def __call__(self, data: Any) -> Any:
        if not self.is_lost:
            self.is_lost = True
            raise WorkerError(FailedWorker("rollout", 0, "host", "compute_log_prob", "the worker process died"))
        return self.score(data)


def test_a_rollout_lost_in_a_probe_is_asked_in_the_next_one(toy: Toy, tmp_path: Path) -> None:
    trainer = build_trainer(load_config(toy.overrides(tmp_path / "out", LOCAL)))
    with closing(trainer):
        trainer.init_workers()
        trainer.push_weights()
        probe = trainer.parts.parity
        assert probe is not None
        probe = replace(probe, score=LostOnce(probe.score))
        reports = [probe.run(0), probe.run(0)]
    assert [report.metrics()["parity/skipped"] for report in reports] == [1, 0]
    assert reports[0].scored is None
    assert reports[1].scored is not None
    assert reports[1].scored.max_abs < 1e-4
