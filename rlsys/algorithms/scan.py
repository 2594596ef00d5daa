"""Discounted sums from the right over the tokens that count, without a loop over tokens."""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64


def reverse_scan(values: Tensor, decay: float) -> Tensor:
    """`y[t] = values[t] + decay * y[t + 1]` along the last of two dimensions, for decay in [0, 1].

    Blocks of 64 columns are summed by one product with the triangular matrix of the powers of `decay`; the values at
    the block starts obey the same recurrence with `decay ** 64`, one level up. Nothing is divided: no overflow.
    """
    rows, columns = values.shape
    steps = torch.arange(BLOCK, device=values.device)
    powers = torch.pow(torch.tensor(decay, dtype=values.dtype, device=values.device), steps)
    weights = powers[(steps[:, None] - steps[None, :]).clamp(min=0)].tril()
    num_blocks = -(-columns // BLOCK)
    local = pad(values, (0, num_blocks * BLOCK - columns)).view(rows, num_blocks, BLOCK) @ weights
    if num_blocks > 1:
        later = pad(reverse_scan(local[:, :, 0], decay**BLOCK)[:, 1:], (0, 1))
        local = local + later.unsqueeze(-1) * (powers * decay).flip(0)
    return local.reshape(rows, -1)[:, :columns]


def packed_columns(mask: Tensor) -> Tensor | None:
    """Column of each counting token once a row's tokens are moved left (B, R); None if they are there already."""
    counts = mask.bool()
    if not (counts[:, 1:] & ~counts[:, :-1]).any():
        return None
    return torch.where(counts, counts.cumsum(dim=1) - 1, torch.full_like(mask, mask.shape[1], dtype=torch.int64))


def pack(values: Tensor, mask: Tensor, columns: Tensor | None) -> Tensor:
    """Counting tokens moved to the left of their rows, followed by 0."""
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return kept if columns is None else torch.zeros_like(pad(values, (0, 1))).scatter(1, columns, kept)[:, :-1]


def unpack(values: Tensor, mask: Tensor, columns: Tensor | None) -> Tensor:
    """The inverse of `pack`: every token back in its column, 0 at the others."""
    if columns is not None:
        values = values.gather(1, columns.clamp(max=mask.shape[1] - 1))
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """`G[t] = r[t] + gamma * G[next counting token]` (B, R) in float64, 0 where `mask` is 0."""
    columns = packed_columns(mask)
    return unpack(reverse_scan(pack(rewards.double(), mask, columns), gamma), mask, columns)
