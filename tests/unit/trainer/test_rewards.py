"""Which reward manager a configuration asks for, and what the trainer refuses to be handed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import PPOConfig, load_config
from rlsys.rewards.pool.pool import RewardPool
from rlsys.utils.errors import ConfigError
from trainer.ppo import RayPPOTrainer
from trainer.rewards import reward_manager, reward_pool

LENGTHY = """
class Lengthy:
    def __init__(self, tokenizer, num_examine, max_resp_len=None, overlong_buffer_cfg=None):
        self.given = (max_resp_len, overlong_buffer_cfg.enable, overlong_buffer_cfg.len)

    def grade(self, rows):
        return self.given
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
    assert reward_manager(cfg, None, pool).grade(rows) == (40, True, 7)


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
    with pytest.raises(ConfigError, match=f"{name} is not supported"):
        RayPPOTrainer(cfg, None, {}, None, list, **{name: list})  # pyrefly: ignore[bad-argument-type]
