"""The blocked scan against a loop over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms.scan import discounted_returns, pack, packed_columns, reverse_scan, unpack


def loop(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    out = torch.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        running = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t]:
                running = rewards[row, t].item() + gamma * running
                out[row, t] = running
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    columns=st.integers(1, 300),
    gamma=st.sampled_from([0.0, 1e-3, 0.5, 0.95, 0.999, 1.0]),
    holes=st.booleans(),
)
def test_returns_equal_a_loop_over_tokens(seed: int, columns: int, gamma: float, holes: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, columns, generator=draw, dtype=torch.float64)
    mask = torch.rand(3, columns, generator=draw) > 0.4
    if not holes:
        mask = mask.cummin(dim=1).values
    got = discounted_returns(rewards, mask.long(), gamma)
    torch.testing.assert_close(got, loop(rewards, mask, gamma), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999, 1.0])
def test_long_rows_stay_exact_and_finite(decay: float) -> None:
    values = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, running = [], torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(values.shape[1])):
        running = values[:, t] + decay * running
        expected.append(running)
    torch.testing.assert_close(reverse_scan(values, decay), torch.stack(expected[::-1], 1), rtol=1e-10, atol=1e-10)


def test_pack_moves_counting_tokens_left_and_unpack_puts_them_back() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1]])
    columns = packed_columns(mask)
    packed = pack(values, mask, columns)
    assert packed.tolist() == [[1, 3, 0, 0], [7, 8, 0, 0]]
    assert unpack(packed, mask, columns).tolist() == [[1, 0, 3, 0], [0, 0, 7, 8]]
    assert packed_columns(torch.tensor([[1, 1, 0], [0, 0, 0]])) is None
