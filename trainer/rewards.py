"""Grading as configured: the processes, the manager, and what can be checked before a run starts."""

from collections.abc import Iterable
from contextlib import nullcontext

from rlsys.config.schema.algorithm import GradingConfig, RewardConfig
from rlsys.rewards.pool.pool import Grader, RewardPool
from rlsys.rewards.registry import check_sources
from rlsys.utils.errors import ConfigError, raised_as

HEAD_ONLY = "algorithm.filter_groups.enable = True drops what only a reward model's head scores; set it to false"


def reward_pool(reward: GradingConfig, *, num_workers: int | None = None, judge: str = "") -> RewardPool:
    """The pool of the configured grader; its processes start with the first items. `judge` is HOST:PORT of one."""
    custom, fusion = reward.custom_reward_function, reward.sandbox_fusion
    num_workers = reward.num_workers if num_workers is None else num_workers
    share = max(1, fusion.max_concurrent // max(1, num_workers))
    sandbox = {"memory_limit_mb": fusion.memory_limit_mb, "sandbox_url": fusion.url, "max_concurrent": share}
    kwargs: dict[str, object] = {"sandbox": sandbox, **({"unknown_score": 0.0} if reward.has_head else {})}
    if custom.path is not None:
        kwargs = dict(custom.reward_kwargs)
    if isinstance(reward, RewardConfig) and reward.has_judge:
        kwargs |= {"reward_router_address": judge, "reward_model_tokenizer": reward.reward_model.model_path}
    return RewardPool(Grader(custom.path, custom.name, kwargs), num_workers=num_workers, timeout_s=reward.timeout_s)


def check_reward_function(reward: GradingConfig) -> None:
    """Load a manager of a file, and the function in a process of its own; ConfigError if they cannot be called."""
    if reward.reward_manager.source == "importlib":
        from rlsys.rewards.manager import reward_manager_class

        reward_manager_class(reward)
    if reward.custom_reward_function.path is not None:
        with reward_pool(reward, num_workers=1) as pool:
            pool.start()


def check_data_sources(
    reward: GradingConfig, sources: Iterable[str], *, may_score: bool = False, filters_groups: bool = False
) -> None:
    """ConfigError for rows that nothing would grade: no reward function, and no built-in one for their data source.

    The score of a reward model's head is enough unless the job `filters_groups`, which is done before. Episodes of a
    workflow that `may_score` them itself are not checked.
    """
    if not (reward.is_own or may_score or (reward.has_head and not filters_groups)):
        with raised_as(ConfigError, HEAD_ONLY, ConfigError) if reward.has_head else nullcontext():
            check_sources(sources, runs_here=reward.sandbox_fusion.url is None)
