"""The names that settings choose from are the names that the rooms which carry them out know."""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args

import pytest

from rlsys.config.checks.algorithm import ESTIMATORS, LOSSES, MANAGERS, REJECTIONS
from rlsys.config.checks.files import ROW_FILES
from rlsys.config.checks.run import TRACKERS
from rlsys.config.schema.base import KLEstimator, LossAgg


def room(module: str, name: str) -> Any:
    """A name of another room; the test is skipped while that room is empty."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"{module}.{name} is not here yet")


def test_estimators() -> None:
    assert set(ESTIMATORS) == set(room("rlsys.algorithms", "adv_estimator_names")())


def test_policy_losses() -> None:
    assert set(LOSSES) == set(room("rlsys.algorithms", "policy_loss_names")())


def test_aggregations() -> None:
    assert set(get_args(LossAgg)) == set(room("rlsys.algorithms", "LOSS_AGG_MODES"))


def test_kl_estimators() -> None:
    kinds = set(room("rlsys.algorithms.kl", "KL_KINDS")) - {"full"}
    assert {name.removesuffix("+") for name in get_args(KLEstimator)} == kinds


def test_rejections() -> None:
    correction = "rlsys.algorithms.correction"
    assert set(REJECTIONS) == {*room(correction, "RS_ALIASES"), *room(correction, "RS_MODES")}


def test_trackers() -> None:
    assert set(TRACKERS) == {*room("rlsys.telemetry.tracker_adapters", "ADAPTERS"), "file", "jsonl"}


def test_reward_managers() -> None:
    assert set(MANAGERS) <= set(room("rlsys.rewards.manager", "_FACTORIES"))


def test_row_files(tmp_path: Any) -> None:
    read_rows = room("rlsys.data.files", "read_rows")
    for suffix in ROW_FILES:
        (tmp_path / f"x{suffix}").write_bytes(b"")
        list(read_rows(str(tmp_path / f"x{suffix}")))
