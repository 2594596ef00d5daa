"""The arithmetic of batches: what one step consists of, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config.schema import PPOConfig


@dataclass(frozen=True)
class BatchPlan:
    """What one step consists of. Per-rank numbers are of the training ranks' data-parallel groups."""

    prompts: int
    samples: int
    mini_batch_samples: int
    mini_batches: int
    optimizer_steps: int
    train_ranks: int
    rollout_ranks: int
    colocated: bool
    dp_size: int
    samples_per_rank: int
    use_critic: bool
    use_reference: bool


def plan_batches(cfg: PPOConfig) -> BatchPlan:
    """The batch plan of a validated configuration."""
    actor, rollout, trainer = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout, cfg.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    dp_size = ranks // actor.ulysses_sequence_parallel_size
    samples = cfg.data.train_batch_size * rollout.n
    mini = actor.ppo_mini_batch_size * rollout.n
    use_critic = cfg.critic.enable if cfg.critic.enable is not None else cfg.algorithm.adv_estimator == "gae"
    return BatchPlan(
        prompts=cfg.data.train_batch_size,
        samples=samples,
        mini_batch_samples=mini,
        mini_batches=samples // mini,
        optimizer_steps=samples // mini * actor.ppo_epochs,
        train_ranks=ranks,
        rollout_ranks=trainer.rollout_workers or ranks,
        colocated=trainer.rollout_workers == 0,
        dp_size=dp_size,
        samples_per_rank=samples // dp_size,
        use_critic=use_critic,
        use_reference=actor.use_kl_loss or cfg.algorithm.use_kl_in_reward,
    )
