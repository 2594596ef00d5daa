"""Tokens of multi-turn responses gathered into turns, so that an estimator works on turns, and back.

B rows, R response tokens, T turns. `turn_ids` (B, R) are in 0..T-1, and -1 on tokens that were given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def turn_inputs(inputs: Mapping[str, Any], turn_ids: Tensor) -> dict[str, Any]:
    """Inputs of `gae` over turns: rewards are summed, a turn's value is that of its first token, all (B, T)."""
    rewards, values, mask = (inputs[name] for name in ("token_level_rewards", "values", "response_mask"))
    drawn = mask.bool() & (turn_ids >= 0)
    place = turn_ids.clamp(min=0)
    zeros = rewards.new_zeros(len(rewards), int(place.max()) + 1, dtype=torch.float64)
    sums = zeros.scatter_add(1, place, torch.where(drawn, rewards.double(), 0.0))
    counts = zeros.scatter_add(1, place, drawn.double())
    is_first = drawn & (torch.nn.functional.pad(turn_ids[:, :-1], (1, 0), value=-1) != turn_ids)
    firsts = zeros.scatter_add(1, place, torch.where(is_first, values.double(), 0.0))
    return {**inputs, "token_level_rewards": sums, "values": firsts, "response_mask": (counts > 0).to(mask.dtype)}


def spread_turns(values: Tensor, mask: Tensor, turn_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's turn's value (B, R), 0 outside `mask`."""
    return torch.where(mask.bool(), values.gather(1, turn_ids.clamp(min=0)), 0.0).to(dtype)
