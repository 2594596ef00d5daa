"""Losses on preferences against numbers worked out from the papers' formulas."""

from math import exp, log

import pytest
import torch

from rlsys.algorithms.preference_loss import dpo_loss, kto_loss
from rlsys.config.schema.jobs import DPOLossConfig

CHOSEN, REJECTED = (torch.tensor(ratios, dtype=torch.float64) for ratios in ([1.2, -2.0], [-0.3, 1.0]))


def test_dpo_is_the_negative_log_sigmoid_of_the_scaled_margin() -> None:
    loss = dpo_loss(CHOSEN, REJECTED, DPOLossConfig(beta=0.2))
    assert loss.tolist() == pytest.approx([log(1 + exp(-0.3)), log(1 + exp(0.6))], rel=1e-12)
    assert loss.tolist() == pytest.approx([0.5543552444685272, 1.0374879504858856], rel=1e-12)


def test_label_smoothing_takes_a_share_of_the_loss_with_swapped_labels() -> None:
    loss = dpo_loss(CHOSEN, REJECTED, DPOLossConfig(beta=0.2, label_smoothing=0.25))
    assert loss[0].item() == pytest.approx(0.75 * log(1 + exp(-0.3)) + 0.25 * log(1 + exp(0.3)), rel=1e-12)


def test_ipo_draws_the_margin_to_half_the_inverse_of_beta() -> None:
    assert dpo_loss(CHOSEN, REJECTED, DPOLossConfig(loss_type="ipo", beta=0.25)).tolist() == pytest.approx([0.25, 25.0])


def test_kto_weighs_gains_and_losses_against_the_reference_point() -> None:
    config = DPOLossConfig(loss_type="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    loss = kto_loss(torch.tensor([0.8, 0.8], dtype=torch.float64), torch.tensor([True, False]), 0.2, config)
    gain = 1 / (1 + exp(-0.3))
    assert loss.tolist() == pytest.approx([2 * (1 - gain), 3 * gain], rel=1e-12)
