"""The reward manager and the processes that grade, as configured."""

from __future__ import annotations

from typing import Any

from rlsys.config import EvalConfig, PPOConfig
from rlsys.config.schema.algorithm import GradingConfig
from rlsys.rewards.manager import OverlongBuffer, RewardManager, build_reward_manager, load_reward_manager
from rlsys.rewards.pool.pool import Grader, RewardPool


def reward_pool(reward: GradingConfig) -> RewardPool:
    """The pool of the configured grader; its processes start with the first items."""
    custom = reward.custom_reward_function
    built_in = {"memory_limit_mb": reward.sandbox_fusion.memory_limit_mb}
    kwargs = built_in if custom.path is None else custom.reward_kwargs
    grader = Grader(path=custom.path, name=custom.name, kwargs=kwargs)
    return RewardPool(grader, num_workers=reward.num_workers, timeout_s=reward.timeout_s)


def reward_manager(cfg: PPOConfig | EvalConfig, tokenizer: Any, pool: RewardPool) -> RewardManager:
    """The configured manager: registered by name, or a class from a file."""
    chosen, kwargs = cfg.reward.reward_manager, cfg.reward.reward_kwargs
    overlong, longest = kwargs.overlong_buffer_cfg, kwargs.max_resp_len or cfg.data.max_response_length
    buffer = None
    if overlong.enable:
        buffer = OverlongBuffer(
            max_response_tokens=longest,
            num_tokens=overlong.len,
            penalty_factor=overlong.penalty_factor,
            log=overlong.log,
        )
    if chosen.source == "importlib":
        assert chosen.module.path is not None, "checked with the configuration"
        return load_reward_manager(
            chosen.module.path,
            chosen.module.name,
            tokenizer=tokenizer,
            pool=pool,
            reward_fn_key=cfg.data.reward_fn_key,
            config=cfg,
            reward_kwargs={"overlong_buffer_cfg": overlong, "max_resp_len": longest},
        )
    return build_reward_manager(
        chosen.name,
        tokenizer=tokenizer,
        pool=pool,
        reward_fn_key=cfg.data.reward_fn_key,
        overlong_buffer=buffer,
        deadline_s=cfg.trainer.deadlines.reward_s,
    )
