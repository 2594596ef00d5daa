"""The names that settings choose from are those that the modules which implement them know."""

from pathlib import Path
from typing import get_args

from rlsys.algorithms import advantage, policy_loss
from rlsys.config import vocabulary
from rlsys.data.files import read_rows
from rlsys.rewards import manager
from rlsys.telemetry.trackers import ADAPTERS


def test_estimators_and_policy_losses_are_registered() -> None:
    assert set(advantage._ESTIMATORS.names()) == set(vocabulary.ADV_ESTIMATORS)
    assert set(policy_loss._LOSSES.names()) == set(vocabulary.POLICY_LOSSES)


def test_every_kl_estimator_has_a_straight_through_form() -> None:
    names = set(get_args(vocabulary.KLEstimator))
    assert names == {form for kind in vocabulary.KL_KINDS for form in (kind, f"{kind}+")}


def test_rejection_aliases_name_modes() -> None:
    assert set(vocabulary.REJECTION_ALIASES.values()) <= set(vocabulary.REJECTION_MODES)


def test_trackers_and_reward_managers_are_registered() -> None:
    assert set(vocabulary.TRACKERS) == set(ADAPTERS)
    assert set(vocabulary.REWARD_MANAGERS) == set(manager._MANAGERS.names())


def test_every_kind_of_row_file_is_read(tmp_path: Path) -> None:
    for suffix in vocabulary.ROW_FILES:
        (tmp_path / f"x{suffix}").write_bytes(b"")
        assert list(read_rows(str(tmp_path / f"x{suffix}")))
