"""Keys derived from others in ways that a reference cannot express, from resolved values before they are checked."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from rlsys.config.compat.allocation import allocation_settings, supervised_settings
from rlsys.config.introspect import is_count, shown
from rlsys.config.merge import Given
from rlsys.utils.errors import ConfigError

MODE = "trainer.allocation_mode"
CHOICE = "from the plan"
"""The origin of what a job chooses."""
_POLICY, _TOKENS = "actor_rollout_ref", "max_token_len_per_gpu"
BUDGETS = (f"{_POLICY}.actor.ppo_{_TOKENS}", f"critic.ppo_{_TOKENS}", f"reward.reward_model.forward_{_TOKENS}")
COMPILE, ENGINE = "use_torch_compile", f"{_POLICY}.rollout.name"
CHOSEN = (_TOKENS, "enable_gradient_checkpointing", "max_num_seqs", "gpu_memory_utilization", COMPILE, ENGINE)
"""Ends of the keys that a PPO job chooses where they are not set, or `auto` (`rlsys.planning.sizes`)."""
DERIVED = ("from ", "follows ")
"""How the origins of settings begin that follow from others."""
ESTIMATOR, CORRECTION = "algorithm.adv_estimator", "algorithm.rollout_correction"
LOSS, AGGREGATION = f"{_POLICY}.actor.policy_loss.loss_mode", f"{_POLICY}.actor.loss_agg_mode"
GSPO_MODES = {AGGREGATION: "seq-mean-token-mean", "critic.loss_agg_mode": "token-mean"}
"""A critic's loss is averaged as with other losses of the policy."""
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
DYNAMIC, GRADER = f"{_POLICY}.actor.use_dynamic_bsz", "reward.reward_model"
MICRO_BATCHES = {DYNAMIC: f"{_POLICY}.actor.ppo_micro_batch_size_per_gpu"}
MICRO_BATCHES |= {f"{GRADER}.use_dynamic_bsz": f"{GRADER}.micro_batch_size_per_gpu"}
BUDGET = "data.max_token_len_per_gpu"
_NODES, RANKS = "trainer.nnodes", "trainer.n_gpus_per_node"
UNSET_RANKS = f"{RANKS} is not set; verl's default is 8"
_ADAPTED = ("cluster.n_nodes", "cluster.n_gpus_per_node", "actor.mb_spec.max_tokens_per_mb")
"""What AReaL's files say of the cluster and of packs of tokens: other keys may ask for other values."""

Derived = tuple[dict[str, Given], list[str]]
"""Keys that others set, and problems with them."""


def derived_settings(values: Mapping[str, Any], given: Mapping[str, Given], engines: Iterable[str]) -> Derived:
    """The keys set by an allocation, which may come as two `engines`, and by other keys, and problems with them."""
    settings, problems = _from_allocation(values, given, engines)
    mini, prompts = values.get(MINI_BATCH, 1), values.get("data.train_batch_size", 1)
    if MINI_BATCH not in given and is_count(mini) and is_count(prompts) and prompts % mini:
        settings[MINI_BATCH] = Given(prompts, "follows data.train_batch_size", MINI_BATCH)
    longest, budget = values.get("data.max_length", 0), values.get(BUDGET, 0)
    if BUDGET not in given and is_count(longest) and longest > budget:
        settings[BUDGET] = Given(longest, "follows data.max_length", BUDGET)
    if LOSS in given and AGGREGATION not in given and given[LOSS].pair == (LOSS, "gspo"):
        settings |= {key: Given(mode, f"follows {LOSS}", key) for key, mode in GSPO_MODES.items() if key not in given}
    settings |= _expert_tensor(values, settings) | _micro_batches(values, given)
    settings |= _old_answers(values, given) or _quantised_answers(values, given)
    problems += [
        f"{key} = {shown(values[key])}: conflicts with {rule.origin.removeprefix('from ')}; "
        f"set {key}={shown(rule.value)} or remove it"
        for key, rule in settings.items()
        if key in given and values[key] != rule.value and given[key].spelling not in _ADAPTED
    ]
    return settings | _areal_estimator(values, given), problems


def _micro_batches(values: Mapping[str, Any], given: Mapping[str, Given]) -> dict[str, Given]:
    """Packs of tokens where no number of samples is set, which hold the longest sequence."""
    if DYNAMIC not in values:
        return {}
    free = {key: rows for key, rows in MICRO_BATCHES.items() if key not in given and values[rows] is None}
    made = {key: Given(True, f"follows {rows}", key) for key, rows in free.items()}
    parts = ("data.max_prompt_length", "data.max_response_length")
    if all(is_count(values[part]) for part in parts):
        longest = sum(values[part] for part in parts)
        own = [key for key in BUDGETS if key not in given or given[key].spelling in _ADAPTED]
        short = [key for key in own if is_count(values[key]) and values[key] < longest]
        made |= {key: Given(longest, f"follows {' + '.join(parts)}", key) for key in short}
    return made


def _old_answers(values: Mapping[str, object], given: Mapping[str, Given]) -> dict[str, Given]:
    """PPO's clipping around the policies that drew the answers, where they may be old and no correction is chosen.

    With one optimizer step a batch nothing is clipped around log-probs of the weights that are about to be trained.
    """
    if any(key.startswith(f"{CORRECTION}.") for key in given) or values.get("trainer.max_staleness", 0) in (0, None):
        return {}
    uses_own = values[LOSS] != "vanilla" or "baseline" in f"{values[ESTIMATOR]}"
    if uses_own or values[f"{_POLICY}.actor.router_replay.mode"] == "R2" or values["trainer.sync_freq"] != 1:
        return {}
    keys = (f"{CORRECTION}.bypass_mode", f"{_POLICY}.actor.calculate_entropy")
    return {key: Given(True, "follows trainer.max_staleness", key) for key in keys if key not in given}


def _quantised_answers(values: Mapping[str, object], given: Mapping[str, Given]) -> dict[str, Given]:
    """Token-level importance weights where FP8 weights draw the answers and no correction is chosen."""
    key, cause = f"{CORRECTION}.rollout_is", f"{_POLICY}.rollout.quantization"
    is_chosen = any(name.startswith(f"{CORRECTION}.") for name in given)
    return {key: Given("token", f"follows {cause}", key)} if key in values and values[cause] and not is_chosen else {}


def _expert_tensor(values: Mapping[str, Any], allocated: Mapping[str, Given]) -> dict[str, Given]:
    """Whole experts on each rank where matrices of tensor_model_parallel_size parts do not divide the ranks."""
    values = {**values, **{key: one.value for key, one in allocated.items()}}
    ranks, made = [values[_NODES], values[RANKS]], dict[str, Given]()
    for key in (key for key in values if key.endswith("megatron.expert_tensor_parallel_size")):
        names = ("tensor_model_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
        sizes = [values[f"{key.rpartition('.')[0]}.{name}"] for name in names]
        if values[key] is None and all(map(is_count, [*ranks, *sizes])) and prod(ranks) % prod(sizes) and sizes[1] > 1:
            made[key] = Given(1, "follows trainer.n_gpus_per_node", key)
    return made


def _areal_estimator(values: Mapping[str, object], given: Mapping[str, Given]) -> dict[str, Given]:
    """The estimator that computes what AReaL's actor does without a critic: from normalized rewards or advantages."""
    is_areal = ESTIMATOR in values and any(setting.spelling.startswith("actor.") for setting in given.values())
    if not is_areal or any(key == ESTIMATOR or key.startswith("critic.") for key in given):
        return {}
    if values["algorithm.adv_norm.mean_level"] == values["algorithm.adv_norm.std_level"] == "batch":
        return {ESTIMATOR: Given("reinforce_plus_plus", "from actor.adv_norm", ESTIMATOR)}
    if values["algorithm.reward_norm.mean_level"] != "group":
        return {}
    by_std = values["algorithm.reward_norm.std_level"] == "group"
    sets = {ESTIMATOR: "grpo", "algorithm.norm_adv_by_std_in_grpo": by_std}
    return {key: Given(value, "from actor.reward_norm", key) for key, value in sets.items()}


def _from_allocation(values: Mapping[str, Any], given: Mapping[str, Given], engines: Iterable[str]) -> Derived:
    """The counts of an allocation, also of one in two parts; counts that are also set must agree with it."""
    text, nnodes, node_size = values.get(MODE) or "+".join(engines) or None, values[_NODES], values[RANKS]
    text = str(text) if is_count(text) else text
    if not isinstance(text, str) or not is_count(nnodes) or not is_count(node_size):
        return {}, []
    if _NODES not in given or given[_NODES].spelling not in _ADAPTED:
        nnodes, node_size = (0, node_size) if RANKS in given else (nnodes, 0)
    try:
        counts = (allocation_settings if MODE in values else supervised_settings)(text, nnodes, node_size)
    except ConfigError as error:
        return {}, [f"{MODE}: {error}"]
    # the engine is as good as set: a job does not choose another
    return {key: Given(n, f"{'' if key == ENGINE else 'from '}{MODE}={text}", key) for key, n in counts.items()}, []
