"""Aggregation: numbers by hand, and splitting a batch any way gives the same total, count and gradient."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algorithms.aggregate import LOSS_AGG_MODES, agg_loss
from rlsys.algorithms.masked import at_last_token, carried_back, masked_mean, masked_std, masked_whiten

LOSS = torch.tensor([[1.0, 2.0, 100.0], [3.0, 100.0, 100.0], [100.0, 100.0, 100.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 6 / 3),
        ("token-sum", 6),
        ("seq-mean-token-sum", 6 / 2),
        ("seq-mean-token-sum-norm", 6 / 2 / 3),
        ("seq-mean-token-mean", (1.5 + 3) / 2),
    ],
)
def test_modes_by_hand(mode: str, expected: float) -> None:
    total, count = agg_loss(LOSS, MASK, mode)
    assert (total / count).item() == pytest.approx(expected)


def test_norm_takes_a_constant_and_an_unknown_mode_is_refused() -> None:
    total, count = agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", loss_scale_factor=10)
    assert (total / count).item() == pytest.approx(6 / 2 / 10)
    with pytest.raises(ValueError, match="token-mean"):
        agg_loss(LOSS, MASK, "tokenmean")


def test_a_smaller_mask_leaves_the_count_alone() -> None:
    kept = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 0]])
    total, count = agg_loss(LOSS, kept, "token-mean", count_mask=MASK)
    assert (total.item(), count.item()) == (4, 3)
    total, count = agg_loss(LOSS, kept, "seq-mean-token-mean", count_mask=MASK)
    assert (total.item(), count.item()) == (1 + 3, 2)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(LOSS_AGG_MODES),
    cuts=st.lists(st.integers(1, 8), max_size=4),
)
def test_any_split_of_the_rows_gives_the_same_loss_and_gradient(seed: int, mode: str, cuts: list[int]) -> None:
    draw = torch.Generator().manual_seed(seed)
    loss = torch.randn(9, 7, generator=draw, dtype=torch.float64, requires_grad=True)
    mask = (torch.rand(9, 7, generator=draw) > 0.4).long()
    mask[0, 0] = 1
    whole, count = agg_loss(loss, mask, mode, batch_rows=9)
    (gradient,) = torch.autograd.grad(whole / count, loss)
    bounds = [0, *sorted(cuts), 9]
    parts = [agg_loss(loss[a:b], mask[a:b], mode, batch_rows=9) for a, b in pairwise(bounds) if a < b]
    total, parts_count = sum(t for t, _ in parts), sum(c.double() for _, c in parts)
    (parts_gradient,) = torch.autograd.grad(total / parts_count, loss)
    torch.testing.assert_close(total / parts_count, whole / count, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts_gradient, gradient, rtol=1e-12, atol=1e-12)


def test_masked_helpers_ignore_what_is_outside() -> None:
    values = torch.tensor([[1.0, 3.0, torch.nan], [torch.nan, torch.nan, torch.nan]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_mean(values, mask).item() == 2
    assert masked_mean(values, mask, dim=1).tolist() == [2, 0]
    assert masked_whiten(values, mask)[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0])
    assert masked_whiten(values, mask).dtype == torch.float32
    assert masked_whiten(torch.tensor([[5.0]]), torch.tensor([[1]])).tolist() == [[0]]
    placed = at_last_token(torch.tensor([7.0, 8.0]), torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]]))
    assert placed.tolist() == [[0, 0, 7, 0], [0, 0, 0, 0]]
    assert at_last_token(torch.tensor([7.0]), torch.tensor([[1, 0, 0]])).tolist() == [[7, 0, 0]]
    assert at_last_token(torch.tensor([7]), torch.tensor([[1, 1]])).dtype == torch.int64
    moved = carried_back(
        torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]]), torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]])
    )
    assert moved.tolist() == [[1, 6, 0, 8], [15, 0, 0, 0]]
    assert masked_std(values, torch.tensor([[1, 1, 0], [0, 0, 0]])).item() == pytest.approx(2**0.5)
    assert masked_std(values, torch.tensor([[0, 1, 0], [0, 0, 0]])).item() == 0
