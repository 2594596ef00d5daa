"""User code from files: an import that hangs or fails is an error that names the setting."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from rlsys.algorithms import advantage
from rlsys.algorithms.advantage import call_adv_estimator
from rlsys.config.checks.files import model_facts
from rlsys.utils import plugins
from rlsys.utils.errors import ConfigError
from rlsys.utils.plugins import import_libraries, load_from_file

KEY = "reward.custom_reward_function.path"


def test_an_import_that_hangs_is_ended_and_the_timer_of_others_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "IMPORT_S", 0.2)
    path = tmp_path / "grade.py"
    path.write_text("import time\ntime.sleep(100)\ndef compute_score(): ...\n")
    handler, (timer_s, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(ConfigError, match=rf"{KEY}={path} cannot be loaded: .* did not end within 0.2 s"):
        plugins.load_from_file(str(path), "compute_score", key=KEY)
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(timer_s, abs=60)
    path.write_text("def compute_score(): return 3\n")
    assert plugins.load_from_file(str(path), "compute_score", key=KEY)() == 3


def test_a_file_may_import_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "grades_of_mine.py").write_text("BEST = 7\n")
    (tmp_path / "reward.py").write_text("from grades_of_mine import BEST\ndef compute_score(): return BEST\n")
    assert plugins.load_from_file(str(tmp_path / "reward.py"), "compute_score", key=KEY)() == 7


def test_a_model_configuration_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert model_facts(tmp_path) == {}


def test_a_file_that_was_edited_is_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two runs of a notebook, whose workers import what the file is now; else it is imported once."""
    monkeypatch.setattr(advantage._ESTIMATORS, "_functions", dict(advantage._ESTIMATORS._functions))
    file, key = tmp_path / "edited.py", "actor_rollout_ref.model.external_lib"
    register = "from rlsys.algorithms import register_adv_est\n\n\n@register_adv_est('test_edited')\n"
    body = "def edited(*, token_level_rewards):\n    return {} * token_level_rewards, token_level_rewards\n"
    results = []
    for factor in (1, 1, 20):
        file.write_text(register + body.format(factor))
        import_libraries([(key, str(file))])
        results.append(call_adv_estimator("test_edited", {"token_level_rewards": torch.ones(1, 1)})[0].item())
    assert results == [1, 1, 20]
    again = load_from_file(str(file), "edited", key=key)
    import_libraries([(key, str(file))])
    assert load_from_file(str(file), "edited", key=key) is again
    other = tmp_path / "other.py"
    other.write_text(register + body.format(3))
    with pytest.raises(ConfigError, match=r"other\.py cannot be loaded.*already registered as rlsys_plugin_edited"):
        import_libraries([(key, str(other))])


def test_an_edit_that_cannot_be_loaded_may_be_taken_back(tmp_path: Path) -> None:
    file, whole = tmp_path / "grade.py", "def compute_score(): return 3\n"
    for source in (whole, "raise ValueError('half')\n", whole):
        file.write_text(source)
        if source != whole:
            with pytest.raises(ConfigError, match="cannot be loaded: ValueError: half"):
                load_from_file(str(file), "compute_score", key=KEY)
        else:
            assert load_from_file(str(file), "compute_score", key=KEY)() == 3
