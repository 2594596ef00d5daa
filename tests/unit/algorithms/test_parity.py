"""The comparison behind the parity probe, against numbers by hand."""

import math

import pytest
import torch

from rlsys.algorithms.mismatch import compare_log_probs

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_differences_by_hand() -> None:
    trainer = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, 0.0, 0.0]])
    engine = torch.tensor([[-1.0, -1.0, 5.0], [-1.0, 0.0, 0.0]])
    report = compare_log_probs(trainer, engine, MASK)
    assert report.num_tokens == 3
    assert report.mean_abs == pytest.approx((0 + 1 + 0.5) / 3)
    assert report.max_abs == 1.0
    assert (report.row, report.column, report.trainer, report.engine) == (0, 1, -2.0, -1.0)
    k3 = (0 + (math.exp(-1) + 1 - 1) + (math.exp(0.5) - 0.5 - 1)) / 3
    assert report.k3 == pytest.approx(k3)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_value_that_is_not_finite_is_the_worst(value: float) -> None:
    engine = torch.tensor([[-1.0, -1.0, 0.0], [value, 0.0, 0.0]])
    report = compare_log_probs(torch.full((2, 3), -1.5), engine, MASK)
    assert (report.max_abs, report.mean_abs) == (math.inf, math.inf)
    assert (report.row, report.column) == (1, 0)


def test_small_differences_are_found_inside_the_mask_and_large_ones_are_bounded_in_k3() -> None:
    trainer, engine = torch.tensor([[-9.0, -2.0, -1.0]]), torch.tensor([[-1.0, -2.0, -1.25]])
    report = compare_log_probs(trainer, engine, torch.tensor([[0, 1, 1]]))
    assert (report.row, report.column, report.max_abs) == (0, 2, 0.25)
    for far, k3 in ((30.0, math.exp(20) - 21), (-30.0, math.exp(-20) + 19), (-math.inf, math.exp(-20) + 19)):
        one = compare_log_probs(torch.tensor([[far]]), torch.zeros(1, 1), torch.ones(1, 1))
        assert one.k3 == pytest.approx(k3)


def test_nothing_that_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="mask is empty"):
        compare_log_probs(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
