"""Whether estimator, losses, corrections, rewards and sampling fit together."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from rlsys.config.checks.findings import note, wrong
from rlsys.config.schema.algorithm import RolloutCorrectionConfig
from rlsys.config.schema.jobs import PPOConfig
from rlsys.config.vocabulary import (
    ADV_ESTIMATORS,
    GROUP_ESTIMATORS,
    POLICY_LOSSES,
    REJECTION_ALIASES,
    REJECTION_MODES,
    REWARD_MANAGERS,
)

N = "actor_rollout_ref.rollout.n"
CORRECTION = "algorithm.rollout_correction"


def check_algorithm(cfg: PPOConfig) -> Iterator[str]:
    """Estimator, critic, KL terms, policy loss, correction, filters and reward shaping."""
    yield from _registered(cfg)
    yield from _groups(cfg)
    yield from _critic(cfg)
    yield from _kl(cfg)
    yield from _policy_loss(cfg)
    yield from _correction(cfg)
    yield from _filters(cfg)
    yield from _rewards(cfg)


def _registered(cfg: PPOConfig) -> Iterator[str]:
    """Names that a registry knows; a module of the user's own may register more."""
    if cfg.actor_rollout_ref.model.external_lib:
        return
    manager = cfg.reward.reward_manager
    for key, name, known in (
        ("algorithm.adv_estimator", cfg.algorithm.adv_estimator, ADV_ESTIMATORS),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            cfg.actor_rollout_ref.actor.policy_loss.loss_mode,
            POLICY_LOSSES,
        ),
        (
            "reward.reward_manager.name",
            manager.name,
            REWARD_MANAGERS if manager.source == "register" else (manager.name,),
        ),
    ):
        if name not in known:
            near = get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"write {key}={near[0]}; " if near else ""
            own = "one of your own is registered by a module named in actor_rollout_ref.model.external_lib"
            yield wrong(key, name, f"there is none of that name; {hint}choose from {', '.join(known)}; {own}")


def _groups(cfg: PPOConfig) -> Iterator[str]:
    n, estimator = cfg.actor_rollout_ref.rollout.n, cfg.algorithm.adv_estimator
    if n > 1:
        return
    why = f"compares the answers to one prompt, so it needs several; write {N}=8"
    if estimator in GROUP_ESTIMATORS:
        yield wrong(N, n, f"algorithm.adv_estimator={estimator} {why}")
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(cfg.algorithm, name)
        for level in ("mean_level", "std_level"):
            if getattr(norm, level) == "group":
                yield wrong(N, n, f"algorithm.{name}.{level}=group {why}")


def _critic(cfg: PPOConfig) -> Iterator[str]:
    estimator, enable = cfg.algorithm.adv_estimator, cfg.critic.enable
    if estimator == "gae" and enable is False:
        yield wrong("critic.enable", False, "algorithm.adv_estimator=gae needs values; write critic.enable=true")
    if estimator != "gae" and estimator in ADV_ESTIMATORS and enable:
        why = f"algorithm.adv_estimator={estimator} does not use its values; it is trained all the same"
        yield note("critic.enable", True, why)
    if cfg.trainer.critic_warmup > 0 and not cfg.use_critic:
        yield wrong(
            "trainer.critic_warmup", cfg.trainer.critic_warmup, "there is no critic; write trainer.critic_warmup=0"
        )


def _kl(cfg: PPOConfig) -> Iterator[str]:
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        why = "the KL to the reference is then counted twice, in the loss and in the reward"
        yield note("algorithm.use_kl_in_reward", True, why)
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        key = "actor_rollout_ref.actor.use_kl_loss"
        yield note(key, True, "kl_loss_coef is 0, so a reference is kept for the metric only")
    if not algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive":
        key = "algorithm.use_kl_in_reward"
        yield wrong(key, False, f"algorithm.kl_ctrl.type=adaptive steers a penalty that is off; write {key}=true")


def _policy_loss(cfg: PPOConfig) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    loss = actor.policy_loss
    if actor.clip_ratio_low > 1 and loss.loss_mode in ("vanilla", "gspo", "clip_cov", "kl_cov"):
        why = "a ratio cannot fall below 0, so this clips nothing; write a number from 0 to 1"
        yield wrong("actor_rollout_ref.actor.clip_ratio_low", actor.clip_ratio_low, why)
    if loss.clip_cov_lb > loss.clip_cov_ub:
        key = "actor_rollout_ref.actor.policy_loss.clip_cov_lb"
        yield wrong(key, loss.clip_cov_lb, f"more than clip_cov_ub={loss.clip_cov_ub:g}; write a smaller one")
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        key = "actor_rollout_ref.actor.loss_agg_mode"
        why = "loss_scale_factor is looked at by seq-mean-token-sum-norm only; write that or leave the factor out"
        yield wrong(key, actor.loss_agg_mode, why)


def _correction(cfg: PPOConfig) -> Iterator[str]:
    correction = cfg.algorithm.rollout_correction
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield wrong(f"{CORRECTION}.loss_type", "reinforce", f"it is a bypass loss; write {CORRECTION}.bypass_mode=true")
    loss_mode = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.bypass_mode and loss_mode not in ("vanilla", "bypass_mode"):
        key = "actor_rollout_ref.actor.policy_loss.loss_mode"
        yield wrong(key, loss_mode, f"in bypass mode {CORRECTION}.loss_type is the loss; write {key}=vanilla")
    yield from _thresholds(correction)


def _thresholds(correction: RolloutCorrectionConfig) -> Iterator[str]:
    key = f"{CORRECTION}.rollout_is_threshold"
    if correction.rollout_is and not _bounds(correction.rollout_is_threshold):
        yield wrong(key, correction.rollout_is_threshold, f"must be a number above 0, or low_high; write {key}=2.0")
    if correction.bypass_mode and correction.loss_type == "reinforce" and correction.rollout_is_batch_normalize:
        key = f"{CORRECTION}.rollout_is_batch_normalize"
        why = f"in bypass mode with loss_type=reinforce the weights change with every update; write {key}=false"
        yield wrong(key, True, why)
    yield from _rejections(correction)


def _rejections(correction: RolloutCorrectionConfig) -> Iterator[str]:
    key, measures, bounds = f"{CORRECTION}.rollout_rs", correction.rollout_rs, correction.rollout_rs_threshold
    if measures is None:
        if bounds is not None:
            yield wrong(f"{key}_threshold", bounds, f"there is nothing to bound; write {key}=token_k1, for example")
        return
    modes = (*REJECTION_ALIASES, *REJECTION_MODES)
    names = [name.strip() for name in measures.split(",")]
    for name in names:
        if name not in modes:
            near = get_close_matches(name, modes, n=1)
            hint = f"; write {near[0]}" if near else ""
            yield wrong(key, measures, f"'{name}' is none of {', '.join(modes)}{hint}")
    if bounds is None:
        yield wrong(key, measures, f"it needs a bound; write {key}_threshold=0.5_2.0, for example")
        return
    limits = [limit.strip() for limit in bounds.split(",")]
    if len(limits) not in (1, len(names)):
        yield wrong(f"{key}_threshold", bounds, f"one bound, or one for each of the {len(names)} measures of {key}")
        return
    for name, limit in zip(names, limits * len(names) if len(limits) == 1 else limits, strict=True):
        numbers, ratio = _bounds(limit), not name.endswith(("k2", "k3"))
        if not numbers:
            yield wrong(f"{key}_threshold", bounds, f"'{limit}' must be a number above 0, or low_high, e.g. 0.5_2.0")
        elif ratio and len(numbers) == 1 and numbers[0] < 1:
            why = f"'{limit}' bounds the ratio of {name}, so it must be at least 1, or low_high, e.g. 0.5_2.0"
            yield wrong(f"{key}_threshold", bounds, why)
        elif not ratio and len(numbers) > 1:
            yield wrong(f"{key}_threshold", bounds, f"'{limit}': {name} takes one upper bound, e.g. {numbers[-1]:g}")


def _bounds(text: str) -> tuple[float, ...]:
    """One number above 0, or two rising ones joined by _; nothing where the text is neither."""
    try:
        numbers = tuple(float(part) for part in text.split("_"))
    except ValueError:
        return ()
    rising = len(numbers) == 1 or (len(numbers) == 2 and numbers[0] < numbers[1])
    return numbers if rising and all(0 < number < 1e9 for number in numbers) else ()


def _filters(cfg: PPOConfig) -> Iterator[str]:
    groups, n = cfg.algorithm.filter_groups, cfg.actor_rollout_ref.rollout.n
    key = "algorithm.filter_groups"
    if groups.enable and n < 2:
        yield wrong(N, n, f"{key}.enable=true compares the answers to one prompt; write {N}=8")
    if groups.enable and groups.metric is None:
        yield wrong(f"{key}.metric", None, f"{key}.enable=true needs to know what must differ; write {key}.metric=acc")
    if not groups.enable and (groups.metric is not None or groups.max_num_gen_batches):
        yield note(f"{key}.enable", False, "the other keys of filter_groups are not looked at")


def _rewards(cfg: PPOConfig) -> Iterator[str]:
    reward, algorithm = cfg.reward, cfg.algorithm
    overlong, longest = reward.reward_kwargs.overlong_buffer_cfg, cfg.data.max_response_length
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    if overlong.enable:
        limit = reward.reward_kwargs.max_resp_len or longest
        if not 0 < overlong.len <= limit:
            yield wrong(
                f"{key}.len", overlong.len, f"must be from 1 to the longest response, {limit} tokens; write {key}.len=1"
            )
        if reward.reward_manager.name == "naive" and reward.reward_manager.source == "register":
            yield wrong(
                f"{key}.enable", True, "only the dapo manager applies it; write reward.reward_manager.name=dapo"
            )
        if limit > longest:
            why = f"responses end at data.max_response_length={longest}; write {longest} or leave it out"
            yield wrong("reward.reward_kwargs.max_resp_len", limit, why)
    yield from _gdpo(cfg)
    if algorithm.reward_scaling == 0:
        yield wrong("algorithm.reward_scaling", 0.0, "every reward would be 0; write algorithm.reward_scaling=1")
    grader = reward.reward_model
    if grader.enable and grader.model_path is None:
        yield wrong("reward.reward_model.model_path", None, "name the folder of the reward model")
    if grader.enable and grader.enable_resource_pool and grader.nnodes == 0:
        yield wrong("reward.reward_model.nnodes", 0, "its own pool needs nodes; write reward.reward_model.nnodes=1")
    if not grader.enable and grader.model_path is not None:
        yield wrong("reward.reward_model.enable", False, "model_path is set; write reward.reward_model.enable=true")


def _gdpo(cfg: PPOConfig) -> Iterator[str]:
    keys, weights = cfg.algorithm.gdpo_reward_keys, cfg.algorithm.gdpo_reward_weights
    name = "algorithm.gdpo_reward_keys"
    if cfg.algorithm.adv_estimator == "gdpo":
        if not keys:
            yield wrong(name, None, f"gdpo needs the reward's parts; write {name}=[correct,format], for example")
    elif keys is not None or weights is not None:
        yield wrong(
            name, list(keys or ()), f"only gdpo looks at it; algorithm.adv_estimator={cfg.algorithm.adv_estimator}"
        )
    if keys and weights is not None and len(weights) != len(keys):
        why = f"{len(weights)} weights for {len(keys)} keys; write one for each"
        yield wrong("algorithm.gdpo_reward_weights", list(weights), why)


def check_generation(cfg: PPOConfig) -> Iterator[str]:
    """Sampling that gives something to learn from."""
    rollout, val = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.val_kwargs
    key = "actor_rollout_ref.rollout"
    if rollout.temperature == 0:
        yield wrong(f"{key}.temperature", 0.0, f"training needs draws; write {key}.temperature=1.0")
    if not rollout.do_sample and rollout.n > 1:
        yield wrong(
            f"{key}.do_sample", False, f"{N}={rollout.n} answers would all be the same; write {key}.do_sample=true"
        )
    for name, top_k in (("top_k", rollout.top_k), ("val_kwargs.top_k", val.top_k)):
        if top_k == 0:
            yield wrong(f"{key}.{name}", 0, f"nothing could be drawn; write {key}.{name}=-1 for all tokens")
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        why = f"{val.n} equal answers; write {key}.val_kwargs.do_sample=true and a temperature above 0"
        yield wrong(f"{key}.val_kwargs.n", val.n, why)
    if val.do_sample and val.temperature == 0:
        yield note(f"{key}.val_kwargs.do_sample", True, "temperature 0 takes the likeliest token all the same")
    if rollout.parity.freq > 0 and rollout.parity.freq % cfg.trainer.sync_freq:
        why = f"weights are pushed each {cfg.trainer.sync_freq} steps, and only then can they be compared"
        yield note(f"{key}.parity.freq", rollout.parity.freq, why)
    if cfg.use_reference and cfg.actor_rollout_ref.model.lora_adapter_path:
        why = "the reference is the model without any adapter, not the adapter you start from"
        yield note("actor_rollout_ref.model.lora_adapter_path", cfg.actor_rollout_ref.model.lora_adapter_path, why)
