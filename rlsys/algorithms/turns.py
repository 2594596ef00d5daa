"""Tokens of multi-turn responses gathered into turns, so that an estimator works on turns, and back.

B rows, R response tokens, T turns. `turn_ids` (B, R) are in 0..T-1, and -1 on tokens that were given.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlsys.algorithms.groups import group_count


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
    by_turn = values.reshape(len(mask), -1)
    return torch.where(mask.bool(), by_turn.gather(1, turn_ids.clamp(min=0)), 0.0).to(dtype)
