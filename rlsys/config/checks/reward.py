"""Whether reward manager, overlong penalty, reward model and reward shaping fit together."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.config.checks.findings import wrong
from rlsys.config.schema.jobs import PPOConfig


def check_reward(cfg: PPOConfig) -> Iterator[str]:
    """Settings of reward.* and the reward scaling of the algorithm."""
    reward, longest = cfg.reward, cfg.data.max_response_length
    overlong, key = reward.reward_kwargs.overlong_buffer_cfg, "reward.reward_kwargs.overlong_buffer_cfg"
    if overlong.enable:
        limit = reward.reward_kwargs.max_resp_len or longest
        if not 0 < overlong.len <= limit:
            why = f"must be from 1 to the longest response, {limit} tokens; set {key}.len=1"
            yield wrong(f"{key}.len", overlong.len, why)
        if reward.reward_manager.name == "naive" and reward.reward_manager.source == "register":
            yield wrong(f"{key}.enable", True, "only the dapo manager applies it; set reward.reward_manager.name=dapo")
        if limit > longest:
            why = f"responses end at data.max_response_length={longest}; set {longest} or remove it"
            yield wrong("reward.reward_kwargs.max_resp_len", limit, why)
    if cfg.algorithm.reward_scaling == 0:
        yield wrong("algorithm.reward_scaling", 0.0, "every reward would be 0; set algorithm.reward_scaling=1")
    grader = reward.reward_model
    if grader.enable and grader.enable_resource_pool and grader.nnodes == 0:
        yield wrong("reward.reward_model.nnodes", 0, "its own pool needs nodes; set reward.reward_model.nnodes=1")
