"""Which models the algorithm of a run needs beside the actor."""

from __future__ import annotations

from rlsys.config.schema.jobs import PPOConfig


def needs_critic(cfg: PPOConfig) -> bool:
    """Whether there is a critic: as critic.enable says, else where the estimator is gae."""
    return cfg.critic.enable if cfg.critic.enable is not None else cfg.algorithm.adv_estimator == "gae"


def needs_reference(cfg: PPOConfig) -> bool:
    """Whether a frozen reference is needed: for a KL loss or a KL penalty in the reward."""
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward
