"""The start assets: what a run without a model trains, made once and kept in the cache."""

from __future__ import annotations

from rlsys.config import PPOConfig


def with_start_assets(config: PPOConfig) -> PPOConfig:
    """The configuration with the start model and its rows where it names none."""
    if config.actor_rollout_ref.model.path is not None:
        return config
    raise NotImplementedError
