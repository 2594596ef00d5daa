"""Whether estimator, critic, KL terms, losses, corrections and filters fit together."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from rlsys.config.checks.findings import note, wrong
from rlsys.config.schema.algorithm import RolloutCorrectionConfig
from rlsys.config.schema.jobs import PPOConfig
from rlsys.config.vocabulary import ADV_ESTIMATORS, GROUP_ESTIMATORS, REJECTION_ALIASES, REJECTION_MODES

N = "actor_rollout_ref.rollout.n"
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def check_algorithm(cfg: PPOConfig) -> Iterator[str]:
    """Groups, critic, KL terms, policy loss and correction."""
    yield from _groups(cfg)
    yield from _critic(cfg)
    yield from _kl(cfg)
    yield from _policy_loss(cfg)
    yield from _thresholds(cfg.algorithm.rollout_correction)
    yield from _rejections(cfg.algorithm.rollout_correction)


def _groups(cfg: PPOConfig) -> Iterator[str]:
    n, algorithm = cfg.actor_rollout_ref.rollout.n, cfg.algorithm
    reasons = {
        f"algorithm.adv_estimator={algorithm.adv_estimator}": algorithm.adv_estimator in GROUP_ESTIMATORS,
        "algorithm.filter_groups.enable=true": algorithm.filter_groups.enable,
    }
    for name in ("reward_norm", "adv_norm"):
        for level in ("mean_level", "std_level"):
            setting = f"algorithm.{name}.{level}=group"
            reasons[setting] = getattr(getattr(algorithm, name), level) == "group"
    for setting in [setting for setting, compares in reasons.items() if compares and n == 1]:
        yield wrong(N, n, f"{setting} compares several answers to one prompt; set {N}=8")
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if keys and weights is not None and len(weights) != len(keys):
        why = f"{len(weights)} weights for {len(keys)} keys; set one weight for each key"
        yield wrong("algorithm.gdpo_reward_weights", list(weights), why)


def _critic(cfg: PPOConfig) -> Iterator[str]:
    estimator, enable = cfg.algorithm.adv_estimator, cfg.critic.enable
    if estimator == "gae" and enable is False:
        yield wrong("critic.enable", False, "algorithm.adv_estimator=gae needs values; set critic.enable=true")
    if estimator != "gae" and estimator in ADV_ESTIMATORS and enable:
        why = f"the critic is trained, but algorithm.adv_estimator={estimator} does not use its values"
        yield note("critic.enable", True, why)


def _kl(cfg: PPOConfig) -> Iterator[str]:
    actor, algorithm, model = cfg.actor_rollout_ref.actor, cfg.algorithm, cfg.actor_rollout_ref.model
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        why = "the KL to the reference is counted twice, in the loss and in the reward"
        yield note("algorithm.use_kl_in_reward", True, why)
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield note(f"{ACTOR}.use_kl_loss", True, "kl_loss_coef is 0, so the reference only serves the metric")
    if cfg.use_reference and model.lora_adapter_path:
        why = "the reference is the model without adapters, not the adapter that training starts from"
        yield note("actor_rollout_ref.model.lora_adapter_path", model.lora_adapter_path, why)


def _policy_loss(cfg: PPOConfig) -> Iterator[str]:
    actor, bypass_mode = cfg.actor_rollout_ref.actor, cfg.algorithm.rollout_correction.bypass_mode
    loss = actor.policy_loss
    if actor.clip_ratio_low > 1 and loss.loss_mode in ("vanilla", "gspo", "clip_cov", "kl_cov"):
        why = "a ratio cannot fall below 0, so this clips nothing; set a number from 0 to 1"
        yield wrong(f"{ACTOR}.clip_ratio_low", actor.clip_ratio_low, why)
    if loss.clip_cov_lb > loss.clip_cov_ub:
        why = f"more than clip_cov_ub={loss.clip_cov_ub:g}; set a smaller number"
        yield wrong(f"{ACTOR}.policy_loss.clip_cov_lb", loss.clip_cov_lb, why)
    if bypass_mode and loss.loss_mode not in ("vanilla", "bypass_mode"):
        key = f"{ACTOR}.policy_loss.loss_mode"
        yield wrong(key, loss.loss_mode, f"in bypass mode {CORRECTION}.loss_type selects the loss; set {key}=vanilla")


def _thresholds(correction: RolloutCorrectionConfig) -> Iterator[str]:
    key = f"{CORRECTION}.rollout_is_threshold"
    if correction.rollout_is and not _bounds(correction.rollout_is_threshold):
        yield wrong(key, correction.rollout_is_threshold, f"must be a number above 0, or low_high; set {key}=2.0")
    if correction.bypass_mode and correction.loss_type == "reinforce" and correction.rollout_is_batch_normalize:
        key = f"{CORRECTION}.rollout_is_batch_normalize"
        why = f"in bypass mode with loss_type=reinforce the weights change with every update; set {key}=false"
        yield wrong(key, True, why)


def _rejections(correction: RolloutCorrectionConfig) -> Iterator[str]:
    key, measures, bounds = f"{CORRECTION}.rollout_rs", correction.rollout_rs, correction.rollout_rs_threshold
    if measures is None or bounds is None:
        return
    names, modes = [name.strip() for name in measures.split(",")], (*REJECTION_ALIASES, *REJECTION_MODES)
    for name in names:
        if name not in modes:
            near = get_close_matches(name, modes, n=1)
            hint = f"; set {near[0]}" if near else ""
            yield wrong(key, measures, f"'{name}' is not one of {', '.join(modes)}{hint}")
    limits = [limit.strip() for limit in bounds.split(",")]
    if len(limits) not in (1, len(names)):
        yield wrong(f"{key}_threshold", bounds, f"set one bound, or one for each of the {len(names)} measures of {key}")
        return
    for name, limit in zip(names, limits * len(names) if len(limits) == 1 else limits, strict=True):
        if why := _bound_problem(name, limit):
            yield wrong(f"{key}_threshold", bounds, f"'{limit}' {why}")


def _bound_problem(name: str, limit: str) -> str:
    """Why a bound does not suit a rejection measure; empty if it does. k2 and k3 are bounded from above only."""
    numbers, is_ratio = _bounds(limit), not name.endswith(("k2", "k3"))
    if not numbers:
        return "must be a number above 0, or low_high, e.g. 0.5_2.0"
    if is_ratio and len(numbers) == 1 and numbers[0] < 1:
        return f"bounds the ratio of {name}, so it must be at least 1, or low_high, e.g. 0.5_2.0"
    if not is_ratio and len(numbers) > 1:
        return f"has two bounds, but {name} takes one upper bound, e.g. {numbers[-1]:g}"
    return ""


def _bounds(text: str) -> tuple[float, ...]:
    """One number above 0, or two increasing ones joined by _; empty if the text is neither."""
    try:
        numbers = tuple(float(part) for part in text.split("_"))
    except ValueError:
        return ()
    is_increasing = len(numbers) == 1 or (len(numbers) == 2 and numbers[0] < numbers[1])
    return numbers if is_increasing and all(0 < number < 1e9 for number in numbers) else ()
