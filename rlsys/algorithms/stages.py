"""The stages of a batch between rollout and update, on DataProto columns.

Order within a step: `shape_batch_rewards` (AReaL's shaping, if any), `apply_kl_penalty` or `rewards_from_scores`,
`apply_rollout_correction` (if any), `compute_advantage`, `add_selected_tokens`. Each returns a new DataProto which
shares the columns it did not change. Multi-turn responses are gathered into turns and back, so that an estimator works
on turns: B rows, R response tokens, T turns; `turn_ids` (B, R) are in 0..T-1, and -1 on tokens that were given.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlsys.algorithms.advantage import INPUTS, call_adv_estimator, estimator_takes
from rlsys.algorithms.correction import rollout_correction
from rlsys.algorithms.filters import informative_groups, pf_ppo_rows
from rlsys.algorithms.groups import group_count, group_ids_of, normalize
from rlsys.algorithms.kl import KLController
from rlsys.algorithms.kl import kl_penalty as kl_value
from rlsys.algorithms.masked import at_last_token, carried_back, masked_mean
from rlsys.algorithms.policy_loss import select_tokens
from rlsys.algorithms.registry import SectionView
from rlsys.config.schema.actor import ActorConfig
from rlsys.config.schema.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from rlsys.protocol import DataProto, object_array
from rlsys.protocol.columns import tensors_of
from rlsys.protocol.rows import column
from rlsys.utils.errors import ConfigError

ROW_SUMS = ("seq_reward", "score", "seq_final_reward")
"""Metrics of `filter_groups` that are the scores of its rows."""


def with_columns(batch: DataProto, **columns: Tensor) -> DataProto:
    """A new DataProto with these tensors added or replaced; the others are shared."""
    tensors = TensorDict({**tensors_of(batch.batch), **columns}, batch_size=(len(batch),))
    return DataProto(batch=tensors, non_tensor_batch=dict(batch.non_tensor_batch), meta_info=batch.meta_info)


def columns(batch: DataProto, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of the batch by name; ValueError as `column`."""
    return {name: column(batch, name) for name in names}


def group_ids(batch: DataProto, *, num_repeat: int = 1) -> Tensor:
    """Group index of each row (B,): by the column `uid`, else `num_repeat` consecutive rows each."""
    if (uids := batch.non_tensor_batch.get("uid")) is not None:
        return group_ids_of(uids)
    return torch.arange(len(batch)) // num_repeat


def rewards_from_scores(batch: DataProto) -> DataProto:
    """token_level_rewards := token_level_scores, for runs without a KL penalty in the reward."""
    return with_columns(batch, token_level_rewards=column(batch, "token_level_scores"))


@torch.no_grad()
def apply_kl_penalty(
    batch: DataProto, controller: KLController, *, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards := token_level_scores - beta * KL(old || reference) (arXiv:1909.08593).

    The controller is then updated by the mean over rows of their mean KL; empty rows of missing branches do not count.
    Metrics: actor/reward_kl_penalty (that KL), actor/reward_kl_penalty_coeff (the beta that was applied).
    """
    beta, mask = controller.value, column(batch, "response_mask")
    kl = kl_value(column(batch, "old_log_probs"), column(batch, "ref_log_prob"), kl_penalty)
    kl = torch.where(mask.bool(), kl, torch.zeros_like(kl))
    rewards = column(batch, "token_level_scores") - beta * kl
    is_row = mask.bool().any(dim=1)
    is_row[:: rows_per_episode(batch)] = True
    current_kl = masked_mean(kl, mask, dim=1)[is_row].mean().item()
    controller.update(current_kl, int(is_row.sum()))
    metrics = {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
    return with_columns(batch, token_level_rewards=rewards), metrics


def is_truncated(batch: DataProto) -> Tensor:
    """Rows (B,) bool that were cut off at their length, by the column `finish_reason`."""
    if (reasons := batch.non_tensor_batch.get("finish_reason")) is None:
        raise ValueError("mask_no_eos_with_zero needs the column finish_reason")
    return torch.from_numpy(np.asarray([str(reason) == "length" for reason in reasons]))


def shape_batch_rewards(batch: DataProto, config: AlgorithmConfig, *, num_repeat: int = 1) -> DataProto:
    """token_level_scores := each row's outcome after AReaL's reward stage, placed at its last counting token.

    In AReaL's order: bias and scaling, clip, norm, truncation: with `mask_no_eos_with_zero` responses that were cut off
    get 0, after they took part in the normalisation. The batch itself where every reward key has its default.
    """
    is_scaled = config.reward_bias != 0.0 or config.reward_scaling != 1.0 or config.reward_clip is not None
    if not (is_scaled or config.reward_norm.enabled or config.mask_no_eos_with_zero):
        return batch
    scores, ids = column(batch, "token_level_scores").sum(dim=1), group_ids(batch, num_repeat=num_repeat)
    truncated = is_truncated(batch) if config.mask_no_eos_with_zero else torch.zeros(len(batch), dtype=torch.bool)
    size = rows_per_episode(batch)
    shaped = (scores[::size].double() + config.reward_bias) * config.reward_scaling
    if config.reward_clip is not None:
        shaped = shaped.clamp(min=-config.reward_clip, max=config.reward_clip)
    if config.reward_norm.enabled:
        shaped = normalize(shaped, config.reward_norm, group_ids=ids[::size])
    shaped = shaped.masked_fill(truncated[::size], 0.0).repeat_interleave(size).to(scores.dtype)
    return with_columns(batch, token_level_scores=at_last_token(shaped, column(batch, "response_mask")))


def shaped_rewards(
    batch: DataProto, config: AlgorithmConfig, controller: KLController | None = None, *, num_repeat: int = 1
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards out of token_level_scores: `shape_batch_rewards`, then `apply_kl_penalty` if configured."""
    batch = shape_batch_rewards(batch, config, num_repeat=num_repeat)
    if not config.use_kl_in_reward:
        return rewards_from_scores(batch), {}
    return apply_kl_penalty(batch, controller or KLController(config.kl_ctrl), kl_penalty=config.kl_penalty)


def apply_rollout_correction(batch: DataProto, config: RolloutCorrectionConfig) -> tuple[DataProto, dict[str, float]]:
    """Adds `rollout_is_weights`, removes rejected tokens from `response_mask`; metrics are `rollout_corr/*`.

    With `bypass_mode` only `old_log_probs := rollout_log_probs`; the loss `bypass_mode` does the rest. Without
    weights, rejection or bypass mode the batch is returned as it is.
    """
    if config.bypass_mode:
        return with_columns(batch, old_log_probs=column(batch, "rollout_log_probs")), {}
    if not config.corrects:
        return batch, {}
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    corrected = rollout_correction(**columns(batch, names), config=config)
    added = {} if corrected.weights is None else {"rollout_is_weights": corrected.weights}
    return with_columns(batch, response_mask=corrected.response_mask, **added), corrected.metrics


@torch.no_grad()
def compute_advantage(batch: DataProto, config: AlgorithmConfig, *, num_repeat: int = 1, seed: int = 0) -> DataProto:
    """Adds `advantages` and `returns` (B, R) by `config.adv_estimator`.

    Needs token_level_rewards and response_mask; `uid` for estimators with groups (else every `num_repeat` rows are
    one); values for gae; reward_baselines (B,) for remax; old_log_probs and sum_pi_squared for the optimal token
    baselines; the non-tensor columns `gdpo_reward_keys` for gdpo. ValueError naming what is missing.
    Rewards of tokens that do not count, as of rejected ones, are those of the counting token before.
    In a group an episode of several rows counts once, their rewards weighted by `row_weights`. `adv_norm` replaces the
    estimator's own whitening by AReaL's normalisation. With `use_pf_ppo` rows, or episodes with all their rows, are
    resampled by their reward, drawn from `seed`.
    """
    ids, tensors = group_ids(batch, num_repeat=num_repeat), tensors_of(batch.batch)
    inputs: dict[str, Any] = {name: tensors.get(name) for name in INPUTS}
    inputs["token_level_rewards"] = carried_back(*(column(batch, n) for n in ("token_level_rewards", "response_mask")))
    inputs |= {"group_ids": ids, "gamma": config.gamma, "lam": config.lam, "whiten": not config.adv_norm.enabled}
    inputs["norm_adv_by_std_in_grpo"] = config.norm_adv_by_std_in_grpo
    inputs |= {"index": batch.non_tensor_batch.get("uid", ids.numpy()), "config": SectionView(config)}
    if "component_scores" in estimator_takes(config.adv_estimator):
        inputs["component_scores"] = _components(batch, config.gdpo_reward_keys or ())
        weights = config.gdpo_reward_weights
        inputs["component_weights"] = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    in_groups = bool(estimator_takes(config.adv_estimator) & {"group_ids", "index"})
    size = rows_per_episode(batch) if in_groups else 1
    inputs["turn_ids"] = tensors.get("turn_ids") if config.adv_unit == "turn" else None
    if size > 1:
        inputs = episode_inputs(inputs, column(batch, "row_weights"), size)
    turn_ids, mask, rewards = inputs.pop("turn_ids"), inputs["response_mask"], inputs["token_level_rewards"]
    if turn_ids is not None:
        inputs = turn_inputs(inputs, turn_ids, in_groups=in_groups)
    estimated = call_adv_estimator(config.adv_estimator, inputs)
    shapes, expected = [tuple(values.shape) for values in estimated], tuple(inputs["response_mask"].shape)
    if shapes != [expected, expected]:
        raise ConfigError(f"algorithm.adv_estimator={config.adv_estimator} returned {shapes}, not two of {expected}")
    if turn_ids is not None:
        estimated = tuple(spread_turns(values, mask, turn_ids, rewards.dtype) for values in estimated)
    advantages, returns = (values.reshape(len(batch), -1) for values in estimated)
    if config.adv_norm.enabled:
        advantages = normalize(advantages, config.adv_norm, group_ids=ids, mask=column(batch, "response_mask"))
    batch = with_columns(batch, advantages=advantages, returns=returns)
    if not config.use_pf_ppo:
        return batch
    scores = column(batch, "token_level_scores").sum(dim=1)[:: rows_per_episode(batch)]
    return batch.select_idxs(episode_rows(batch, pf_ppo_rows(scores, config.pf_ppo, seed=seed)))


def _components(batch: DataProto, keys: Sequence[str]) -> Tensor:
    if not keys:
        raise ValueError("gdpo needs algorithm.gdpo_reward_keys: the names of the reward parts of compute_score")
    return torch.stack([_numbers(batch.non_tensor_batch, key, "gdpo_reward_keys") for key in keys], dim=1)


def _numbers(columns: Mapping[str, np.ndarray], key: str, setting: str, others: Iterable[str] = ()) -> Tensor:
    """The column (B,) that a setting names; ConfigError unless it is a number in every row."""
    not_numbers = {n: [v for v in values if not isinstance(v, Real | np.bool_)] for n, values in columns.items()}
    if key not in columns or not_numbers[key]:
        known = ", ".join([*others, *sorted(name for name in columns if not not_numbers[name])])
        example = f", one has {not_numbers[key][0]!r:.40}" if key in columns else ""
        raise ConfigError(f"algorithm.{setting}={key} is not a number of every answer{example}; choose from {known}")
    return torch.as_tensor(columns[key].astype(np.float64))


def add_selected_tokens(batch: DataProto, config: ActorConfig, *, seed: int) -> DataProto:
    """Adds `selected_tokens` (B, R), the tokens that clip_cov and kl_cov restrain, chosen over the whole batch.

    Chosen here, the choice does not depend on micro-batches or ranks. Other losses leave the batch as it is.
    """
    selected = select_tokens(config, **columns(batch, ("old_log_probs", "advantages", "response_mask")), seed=seed)
    return batch if selected is None else with_columns(batch, selected_tokens=selected)


def filter_groups(batch: DataProto, *, metric: str = "seq_reward") -> tuple[DataProto, dict[str, float]]:
    """The rows of groups whose metric varies (DAPO's dynamic sampling), in their order, and how many were dropped.

    `metric`: `seq_reward`, `score` or `seq_final_reward` (the row sum of the scores, from which nothing is subtracted
    yet), or a non-tensor column of numbers such as `acc`. An episode without `acc`, which its workflow scored itself,
    counts by its score. Metrics: training/filter_groups_{kept,dropped}, in groups.
    """
    scores = column(batch, "token_level_scores").sum(dim=1) + branch_rewards(batch)
    given = batch.non_tensor_batch
    if metric == "acc" and "episode_end" in given:
        pairs = zip(given.get("acc", [None] * len(batch)), scores.tolist())
        given = {**given, "acc": object_array([score if acc is None else acc for acc, score in pairs])}
    values = scores if metric in ROW_SUMS else _numbers(given, metric, "filter_groups.metric", ROW_SUMS)
    ids, answered = group_ids(batch), column(batch, "response_mask").any(dim=1)
    keep, uids = informative_groups(values, ids) & answered, batch.non_tensor_batch.get("uid", ids.tolist())
    # an episode that failed has a group of its own (`collate_episodes`), but goes where its prompt goes
    prompts = [uid if has else str(uid).rpartition("/")[0] or uid for uid, has in zip(uids, answered.tolist())]
    kept = {prompt for prompt, informs in zip(prompts, keep.tolist(), strict=True) if informs}
    num_kept, total = float(len(kept)), float(len(set(prompts)))
    metrics = {"training/filter_groups_kept": num_kept, "training/filter_groups_dropped": total - num_kept}
    return batch.select_idxs(torch.tensor([prompt in kept for prompt in prompts])), metrics


def branch_rewards(batch: DataProto) -> Tensor:
    """The reward of each row's episode beyond that of the row (B,), see `rlsys.agent.collate`."""
    return torch.tensor([float(reward) for reward in batch.non_tensor_batch.get("branch_rewards", [0.0] * len(batch))])


def rows_per_episode(batch: DataProto) -> int:
    """How many rows each episode has in sequence: one for each of its branches, with `rlsys.agent.collate`."""
    return batch.meta_info.get("rows_per_episode", 1)


def episode_rows(batch: DataProto, episodes: Tensor) -> Tensor:
    """The numbers of all rows of these episodes (E,), which have equally many in sequence."""
    size = rows_per_episode(batch)
    return (episodes[:, None] * size + torch.arange(size)).flatten()


def episode_inputs(inputs: Mapping[str, Any], weights: Tensor, size: int) -> dict[str, Any]:
    """Inputs of an estimator with the `size` rows that each episode has in sequence as one, (B / size, size * R).

    Rewards are multiplied by the rows' `weights`.
    """
    shape = inputs["response_mask"].shape
    inputs = {**inputs, "token_level_rewards": inputs["token_level_rewards"] * weights[:, None]}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == shape:
            inputs[name] = value.reshape(shape[0] // size, -1)
        elif name in ("group_ids", "index", "reward_baselines", "component_scores") and value is not None:
            inputs[name] = value[::size]
    return inputs


def turn_inputs(inputs: Mapping[str, Any], turn_ids: Tensor, *, in_groups: bool = False) -> dict[str, Any]:
    """Inputs of `gae` over turns: rewards are summed, a turn's value is that of its first token, all (B, T).

    With `in_groups` those of a group estimator (B * T, 1): a turn's reward is that from it to the end, its group the
    turns of its number; turns that no other row of the group has are masked out.
    """
    rewards, mask = inputs["token_level_rewards"], inputs["response_mask"]
    drawn = mask.bool() & (turn_ids >= 0)
    place = turn_ids.clamp(min=0)
    zeros = rewards.new_zeros(len(rewards), int(place.max()) + 1, dtype=torch.float64)
    sums = zeros.scatter_add(1, place, torch.where(drawn, rewards.double(), 0.0))
    counts = zeros.scatter_add(1, place, drawn.double())
    if in_groups:
        to_go, numbers = sums.flip(1).cumsum(1).flip(1), torch.arange(zeros.numel()).view_as(zeros)
        groups = inputs["group_ids"][:, None] * zeros.shape[1] + torch.arange(zeros.shape[1])
        ids = torch.where(counts > 0, groups, -1 - numbers).unique(return_inverse=True)[1].flatten()
        compared = (group_count(ids)[ids] > 1)[:, None].to(mask.dtype)
        return {**inputs, "token_level_rewards": to_go.reshape(-1, 1), "response_mask": compared, "group_ids": ids}
    is_first = drawn & (torch.nn.functional.pad(turn_ids[:, :-1], (1, 0), value=-1) != turn_ids)
    firsts = zeros.scatter_add(1, place, torch.where(is_first, inputs["values"].double(), 0.0))
    return {**inputs, "token_level_rewards": sums, "values": firsts, "response_mask": (counts > 0).to(mask.dtype)}


def spread_turns(values: Tensor, mask: Tensor, turn_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's turn's value (B, R), 0 outside `mask`; `values` are (B, T) or (B * T, 1)."""
    return torch.where(mask.bool(), values.reshape(len(mask), -1).gather(1, turn_ids.clamp(min=0)), 0.0).to(dtype)
