"""Settings of the command line that say nothing to what the rest of it asks for.

Files may hold settings for several jobs; what somebody types is meant for this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlsys.config.checks.findings import Note, ignored
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import PPOConfig
from rlsys.config.vocabulary import ADV_ESTIMATORS

_POLICY = "actor_rollout_ref"
_SELDOM = {
    "algorithm.gamma": ("gae", "reinforce_plus_plus"),
    "algorithm.lam": ("gae",),
    "algorithm.norm_adv_by_std_in_grpo": ("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
}
"""Keys that only these estimators look at; of estimators from elsewhere nothing is known."""


def idle_settings(cfg: Section, given: Collection[str]) -> Iterator[Note]:
    """A note for each reason why keys in `given` have no effect."""
    for why, prefixes in _asleep(cfg) if isinstance(cfg, PPOConfig) else ():
        if keys := [key for key in given if key.startswith(prefixes)]:
            yield ignored(keys, why)


def _asleep(cfg: PPOConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Reasons, and how the keys begin that they concern."""
    policy, algorithm, estimator = cfg.actor_rollout_ref, cfg.algorithm, cfg.algorithm.adv_estimator
    actor, rollout = policy.actor, policy.rollout
    if not cfg.use_critic:
        sections = (f"critic.{name}" for name in type(cfg.critic).model_fields if name != "enable")
        yield f"algorithm.adv_estimator={estimator} trains no critic (critic.enable=true makes one)", tuple(sections)
    if not cfg.use_reference:
        why = f"there is no reference; {_POLICY}.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true need one"
        yield why, (f"{_POLICY}.ref.",)
    if actor.strategy != "megatron":
        sections = (f"{_POLICY}.actor.megatron.", f"{_POLICY}.ref.megatron.")
        yield f"{_POLICY}.actor.strategy={actor.strategy}", sections
    if cfg.critic.strategy != "megatron":
        yield f"critic.strategy={cfg.critic.strategy}", ("critic.megatron.",)
    if not actor.use_kl_loss:
        yield f"{_POLICY}.actor.use_kl_loss=false", (f"{_POLICY}.actor.kl_loss_",)
    if not algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward=false", ("algorithm.kl_ctrl.", "algorithm.kl_penalty")
    if estimator in ADV_ESTIMATORS:
        unseen = tuple(key for key, users in _SELDOM.items() if estimator not in users)
        yield f"algorithm.adv_estimator={estimator} has no use for it", unseen
    if not (policy.model.lora_rank or policy.model.lora_adapter_path):
        yield f"{_POLICY}.model.lora_rank=0", (f"{_POLICY}.model.lora_alpha", f"{_POLICY}.model.target_modules")
    if not algorithm.filter_groups.enable:
        sections = tuple(f"algorithm.filter_groups.{name}" for name in ("metric", "max_num_gen_batches"))
        yield "algorithm.filter_groups.enable=false", sections
    if not rollout.val_kwargs.do_sample:
        sections = tuple(f"{_POLICY}.rollout.val_kwargs.{name}" for name in ("top_k", "top_p"))
        yield f"{_POLICY}.rollout.val_kwargs.do_sample=false takes the likeliest token", sections
    if rollout.parity.freq < 0:
        sections = tuple(
            f"{_POLICY}.rollout.parity.{name}" for name in type(rollout.parity).model_fields if name != "freq"
        )
        yield f"{_POLICY}.rollout.parity.freq=-1 never probes", sections
