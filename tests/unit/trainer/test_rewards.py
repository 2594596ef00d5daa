"""Which reward manager a configuration asks for, and what the trainer refuses to be handed."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import PPOConfig, load_config
from rlsys.rewards import manager
from rlsys.rewards.manager import build_reward_manager
from rlsys.rewards.pool.pool import RewardPool
from rlsys.utils.errors import ConfigError, RewardError
from trainer.backend import import_external_libs
from trainer.build import prepare
from trainer.ppo import RayPPOTrainer
from trainer.rewards import check_reward_function, reward_pool

LENGTHY = """
class Lengthy:
    def __init__(self, tokenizer, num_examine, max_resp_len=None, overlong_buffer_cfg=None):
        self.given = (max_resp_len, overlong_buffer_cfg.enable, overlong_buffer_cfg.len)

    def grade(self, rows):
        raise ValueError(self.given)
"""


NUMBERS = count()
no_tokenizer: Any = None
WEIGHTED = """
from rlsys.rewards.manager import register

@register("{name}")
class {name}:
    def __init__(self, tokenizer, num_examine, metric_weights, scale=1.0, compute_score=None):
        self.given = metric_weights, scale, num_examine

    def __call__(self, data, return_dict=False):
        raise NotImplementedError
"""


@pytest.fixture
def cfg(tmp_path: Path) -> PPOConfig:
    (tmp_path / "managers.py").write_text(LENGTHY)
    return load_config(
        [
            "--config-name=quickstart",
            "reward.reward_manager.source=importlib",
            f"reward.reward_manager.module.path={tmp_path / 'managers.py'}",
            "reward.reward_manager.module.name=Lengthy",
            "data.max_response_length=40",
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
            "reward.reward_kwargs.overlong_buffer_cfg.len=7",
        ]
    )


@pytest.fixture
def pool(cfg: PPOConfig) -> Iterator[RewardPool]:
    pool = reward_pool(cfg.reward)
    yield pool
    pool.close()


def test_a_manager_from_a_file_is_given_the_reward_kwargs(cfg: PPOConfig, pool: RewardPool) -> None:
    rows: Any = None
    with pytest.raises(RewardError, match=r"Lengthy of .*: ValueError: \(40, True, 7\)"):
        build_reward_manager(cfg, no_tokenizer, pool).grade(rows)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(manager._MANAGERS, "_functions", {**manager._MANAGERS._functions})


def weighted(tmp_path: Path, source: str, *kwargs: str) -> PPOConfig:
    """The configuration of a manager with keys of its own, of a file or registered by one."""
    name = f"Weighted{next(NUMBERS)}"
    file = tmp_path / f"{name}.py"
    file.write_text(WEIGHTED.format(name=name))
    module = [f"reward.reward_manager.module.path={file}", f"reward.reward_manager.module.name={name}"]
    registered = [f"actor_rollout_ref.model.external_lib={file}", f"reward.reward_manager.name={name}"]
    chosen = module if source == "importlib" else registered
    chosen += [f"trainer.default_local_dir={tmp_path / name}"]
    return load_config(["--config-name=quickstart", f"reward.reward_manager.source={source}", *chosen, *kwargs])


@pytest.mark.parametrize("source", ["importlib", "register"])
def test_a_manager_of_ones_own_takes_its_reward_kwargs(tmp_path: Path, source: str, pool: RewardPool) -> None:
    weights = ["+reward_model.reward_kwargs.metric_weights.accuracy=1", "reward.reward_kwargs.metric_weights.len=-0.1"]
    cfg = weighted(tmp_path, source, *weights, "reward.reward_kwargs.scale=${data.max_response_length}")
    import_external_libs({"actor_rollout_ref.model": cfg.actor_rollout_ref.model})
    made: Any = build_reward_manager(cfg, no_tokenizer, pool)
    given = ({"accuracy": 1, "len": -0.1}, cfg.data.max_response_length, 0)
    assert made._manager.given == given
    removed = weighted(tmp_path, source, *weights, "reward.reward_kwargs.scale=3", "~reward.reward_kwargs.scale")
    import_external_libs({"actor_rollout_ref.model": removed.actor_rollout_ref.model})
    made = build_reward_manager(removed, no_tokenizer, pool)
    assert made._manager.given == (given[0], 1.0, 0)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        (
            ["metric_weight=1"],
            r"unexpected keyword argument 'metric_weight'; of its own it takes metric_weights, scale",
        ),
        (
            ["metric_weights={}", "tokenizer=a", "scale=2"],
            "multiple values for keyword argument 'tokenizer'",
        ),
        ([], r"reward_kwargs: Weighted\d+: missing a required argument: 'metric_weights'"),
    ],
)
def test_reward_kwargs_that_the_class_does_not_take_are_refused(tmp_path: Path, kwargs: list[str], why: str) -> None:
    given = [f"reward.reward_kwargs.{one}" for one in kwargs]
    with pytest.raises(ConfigError, match=why):
        check_reward_function(weighted(tmp_path, "importlib", *given).reward)
    cfg = weighted(tmp_path, "register", *given)
    with pytest.raises(ConfigError, match=why):
        prepare(cfg)


@pytest.mark.parametrize("source", ["importlib", "register"])
def test_an_overlong_penalty_that_the_class_does_not_take_is_refused(tmp_path: Path, source: str) -> None:
    overlong = [f"reward.reward_kwargs.overlong_buffer_cfg.{one}" for one in ("enable=true", "len=4")]
    cfg = weighted(tmp_path, source, "+reward.reward_kwargs.metric_weights.a=1", *overlong)
    with pytest.raises(ConfigError, match=r"enable = True: Weighted\d+ does not take it; set it to false, or name"):
        check_reward_function(cfg.reward) if source == "importlib" else prepare(cfg)


def test_a_missing_class_is_reported_with_those_that_the_file_defines(tmp_path: Path) -> None:
    (tmp_path / "managers.py").write_text(f"from collections import defaultdict\n{LENGTHY}\nsize = 3\n")
    with pytest.raises(ConfigError, match=r"has no class of that name; it defines Lengthy$"):
        load_config(
            [
                "--config-name=quickstart",
                "reward.reward_manager.source=importlib",
                f"reward.reward_manager.module.path={tmp_path / 'managers.py'}",
                "reward.reward_manager.module.name=Missing",
            ]
        )


@pytest.mark.parametrize("name", ["processor", "collate_fn"])
def test_the_trainer_refuses_what_it_would_not_use(cfg: PPOConfig, name: str) -> None:
    with pytest.raises(ConfigError, match=f"takes no {name}; make rows of your own by data.custom_cls"):
        RayPPOTrainer(cfg, None, {}, None, list, **{name: list})  # pyrefly: ignore[bad-argument-type]
