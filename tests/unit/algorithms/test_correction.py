"""Rollout correction, decoupled weights and mismatch diagnostics, by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.algorithms.bypass_loss import bypass_mode
from rlsys.algorithms.correction import Corrected, rollout_correction
from rlsys.algorithms.mismatch import mismatch_metrics, probs_diff_metrics
from rlsys.algorithms.policy_loss import call_policy_loss
from rlsys.config.schema.actor import ActorConfig, PolicyLossConfig
from rlsys.config.schema.algorithm import RolloutCorrectionConfig
from rlsys.config.vocabulary import REJECTION_MODES

RATIO = torch.tensor([[1.0, 3.0, 0.2], [1.5, 1.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def correct(ratio: Tensor = RATIO, mask: Tensor = MASK, **settings: Any) -> Corrected:
    return rollout_correction(
        old_log_probs=ratio.log() - 1,
        rollout_log_probs=torch.full_like(ratio, -1.0),
        response_mask=mask,
        config=RolloutCorrectionConfig(**settings),
    )


def rows(tensor: Tensor | None) -> list[list[float]]:
    assert tensor is not None
    return [[round(x, 6) for x in row] for row in tensor.tolist()]


def test_truncation_masking_and_products() -> None:
    assert rows(correct(rollout_is="token", rollout_is_threshold=2.0).weights) == [[1, 2, 0.2], [1.5, 1, 0]]
    assert rows(correct(rollout_is="token", rollout_is_threshold="0.5_2").weights) == [[1, 0, 0], [1.5, 1, 0]]
    assert rows(correct(rollout_is="token", rollout_is_threshold="0_2").weights) == [[1, 0, 0.2], [1.5, 1, 0]]
    assert rows(correct(rollout_is="token", rollout_is_threshold="0.5_1").weights) == [[1, 0, 0], [0, 1, 0]]
    assert rows(correct(rollout_is="token", rollout_is_threshold="1_2").weights) == [[1, 0, 0], [1.5, 1, 0]]
    assert rows(correct(rollout_is="sequence").weights) == [[0.6] * 3, [1.5, 1.5, 0]]
    assert correct(rollout_is=None).weights is None


def test_batch_normalisation_makes_the_mean_1() -> None:
    token = correct(rollout_is="token", rollout_is_batch_normalize=True)
    assert token.weights is not None
    assert token.weights[MASK.bool()].mean().item() == pytest.approx(1)
    assert token.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(5.7 / 5)
    sequence = correct(rollout_is="sequence", rollout_is_batch_normalize=True).weights
    assert sequence is not None
    assert sequence[:, 0].mean().item() == pytest.approx(1)


def test_a_ratio_is_at_most_exp_20_and_no_weights_at_all_stay_0() -> None:
    huge = correct(RATIO * math.exp(30), rollout_is="token", rollout_is_threshold=9e8).weights
    assert huge is not None
    assert huge[MASK.bool()].tolist() == pytest.approx([math.exp(20)] * 5)
    rejected = correct(RATIO * math.exp(30), rollout_rs="token_k3", rollout_rs_threshold=2.0).metrics
    assert rejected["rollout_corr/rollout_rs_token_k3_max"] == pytest.approx(math.exp(20) - 21)
    none = correct(rollout_is="token", rollout_is_threshold="5_6", rollout_is_batch_normalize=True)
    assert rows(none.weights) == [[0, 0, 0], [0, 0, 0]]
    assert none.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1
    assert none.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0


def test_metrics_of_truncated_weights_by_hand() -> None:
    """Weights [1, 2, 0.2] and [1.5, 1]; the ratios are out of (1/2, 2) at one token above and at one below."""
    metrics = correct(rollout_is="token", rollout_is_threshold=2.0).metrics
    got = {name.rpartition("rollout_is_")[2]: value for name, value in metrics.items() if "rollout_is_" in name}
    mean, square, low, high = 5.7 / 5, (1 + 4 + 0.04 + 2.25 + 1) / 5, 3.2 / 3, 1.25
    expected = {"mean": mean, "max": 2, "min": 0.2, "std": (square - mean**2) ** 0.5}
    expected |= {"eff_sample_size": mean**2 / square, "ratio_fraction_high": 0.2, "ratio_fraction_low": 0.2}
    expected |= {"seq_mean": (low + high) / 2, "seq_std": (high - low) / 2**0.5, "seq_max": high, "seq_min": low}
    expected |= {"seq_max_deviation": 0.25, "seq_fraction_high": 0, "seq_fraction_low": 0}
    assert got == pytest.approx(expected)
    assert not any("rollout_rs" in name for name in metrics)


def test_a_small_deviation_of_weights_is_not_lost_in_float32() -> None:
    """In float32 the mean square of 1.4 comes out below the squared mean, and of weights near 1 above it."""
    metrics = correct(torch.full((2, 3), 1.4), rollout_is="token").metrics
    assert metrics["rollout_corr/rollout_is_std"] == pytest.approx(0, abs=1e-6)
    near = 1 + 1e-5 * torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    metrics = correct(near, rollout_is="token").metrics
    assert metrics["rollout_corr/rollout_is_std"] == pytest.approx(1e-5, rel=0.05)


def test_shares_out_of_an_interval_of_weights() -> None:
    ratio = torch.tensor([[1.0, 8.0, 0.3], [0.4, 0.4, 1.0]], dtype=torch.float64)
    metrics = correct(ratio, rollout_is="token", rollout_is_threshold="0.5_3").metrics
    prefix = "rollout_corr/rollout_is"
    assert metrics[f"{prefix}_oob_ratio"] == pytest.approx(4 / 5)
    assert metrics[f"{prefix}_ratio_fraction_low"] == pytest.approx(3 / 5)
    assert metrics[f"{prefix}_ratio_fraction_high"] == pytest.approx(1 / 5)
    assert metrics[f"{prefix}_seq_fraction_high"] == metrics[f"{prefix}_seq_fraction_low"] == 0.5  # 9.3 / 3 and 0.4
    no_floor = correct(ratio, rollout_is="token", rollout_is_threshold="0_3").metrics
    assert no_floor[f"{prefix}_ratio_fraction_low"] == no_floor[f"{prefix}_seq_fraction_low"] == 0


@pytest.mark.parametrize(
    ("mode", "threshold", "kept"),
    [
        ("token", "0.5_2", [[1, 0, 0], [1, 1, 0]]),
        ("token_k1", 2.0, [[1, 0, 0], [1, 1, 0]]),
        ("token_k1", "0.5_6", [[1, 0, 1], [1, 1, 0]]),
        ("token_k2", 0.1, [[1, 0, 0], [1, 1, 0]]),
        ("token_k3", 0.85, [[1, 0, 1], [1, 1, 0]]),
        ("sequence", 1.6, [[0, 0, 0], [1, 1, 0]]),
        ("geometric", 1.2, [[1, 1, 1], [0, 0, 0]]),
        ("seq_sum_k2", 1.0, [[0, 0, 0], [1, 1, 0]]),
        ("seq_mean_k3", 0.5, [[0, 0, 0], [1, 1, 0]]),
        ("seq_max_k2", 1.2, [[0, 0, 0], [1, 1, 0]]),
        ("token_k1, seq_sum_k2", "2,3", [[1, 0, 0], [1, 1, 0]]),
        ("token_m2", 0.04, [[1, 0, 0], [0, 1, 0]]),
        ("token_m2", 0.35, [[1, 1, 0], [1, 1, 0]]),
    ],
)
def test_rejection(mode: str, threshold: Any, kept: list[list[int]]) -> None:
    assert correct(rollout_rs=mode, rollout_rs_threshold=threshold).response_mask.tolist() == kept


@pytest.mark.parametrize(("limit", "kept"), [(0.9, [0, 0, 0, 0]), (2.0, [1, 0, 0, 0]), (2.6, [1, 1, 0, 0])])
def test_the_second_moment_is_that_of_all_kept_tokens(limit: float, kept: list[int]) -> None:
    """Squares 1 and 4: the mean of both is 2.5. Tokens outside the mask do not lower it."""
    ratio, mask = torch.tensor([[1.0, 2.0, 0.0, 0.0]]).double().exp(), torch.tensor([[1, 1, 0, 0]])
    assert correct(ratio, mask, rollout_rs="token_m2", rollout_rs_threshold=limit).response_mask.tolist() == [kept]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("outside", [math.nan, 50.0])
def test_nothing_outside_the_mask_matters(level: str, outside: float) -> None:
    settings = {"rollout_is": level, "rollout_rs": ",".join(REJECTION_MODES), "rollout_rs_threshold": 2.0}
    settings |= {"rollout_is_batch_normalize": True, "rollout_token_veto_threshold": 0.1}
    clean, dirty = correct(**settings), correct(RATIO.where(MASK.bool(), torch.tensor(outside)), **settings)
    assert rows(dirty.weights) == rows(clean.weights)
    assert torch.equal(dirty.response_mask, clean.response_mask)
    assert dirty.metrics == clean.metrics


def test_metrics_show_how_much_was_rejected() -> None:
    metrics = correct(rollout_rs="token", rollout_rs_threshold=2.0).metrics
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 2)
    assert metrics["rollout_corr/rollout_rs_token_k1_fraction_high"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_without_tokens_change_no_metric(level: str) -> None:
    """Such as branches that an episode lacks."""
    settings = {"rollout_is": level, "rollout_rs": "token", "rollout_rs_threshold": 2.0}
    settings |= {"rollout_token_veto_threshold": 0.25, "rollout_is_batch_normalize": True}
    ratio, mask = (torch.cat([whole, torch.zeros_like(whole[:1])]) for whole in (RATIO + 0, MASK))
    with_empty, without = correct(ratio + (ratio == 0), mask, **settings), correct(**settings)
    assert with_empty.metrics == pytest.approx(without.metrics)
    assert rows(with_empty.weights)[:-1] == rows(without.weights)


def test_shares_of_sequences_count_sequences_and_not_their_tokens() -> None:
    ratio, mask = (
        torch.tensor([[3.0, 1.0, 1.0, 1.0], [0.9, 1.0, 1.0, 1.0]]).double(),
        torch.tensor([[1] * 4, [1, 0, 0, 0]]),
    )
    weights = correct(ratio, mask, rollout_is="sequence").metrics
    assert weights["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    rejected = correct(ratio, mask, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2").metrics
    prefix = "rollout_corr/rollout_rs_seq_sum_k1"
    low, high = -math.log(3.0), -math.log(0.9)
    assert rejected[f"{prefix}_fraction_low"] == rejected[f"{prefix}_seq_fraction_low"] == 0.5
    assert rejected[f"{prefix}_seq_std"] == pytest.approx((high - low) / 2**0.5)
    assert rejected[f"{prefix}_seq_max_deviation"] == pytest.approx(-low)
    assert rejected[f"{prefix}_std"] == pytest.approx(0.4 * (high - math.log(0.5)))  # 4 tokens at log 0.5, 1 at high


def test_an_empty_mask_gives_no_weights_and_no_nan() -> None:
    empty = correct(mask=torch.zeros_like(MASK), rollout_is="token", rollout_rs="geometric", rollout_rs_threshold=2.0)
    assert empty.weights is not None
    assert (empty.weights == 0).all()
    assert empty.metrics == {}


def test_equal_policies_change_nothing() -> None:
    same = correct(
        torch.ones_like(RATIO), rollout_is="token", rollout_rs=",".join(REJECTION_MODES), rollout_rs_threshold=1.1
    )
    assert same.weights is not None
    assert torch.equal(same.weights, MASK.double())
    assert torch.equal(same.response_mask, MASK)
    assert same.metrics["rollout_corr/kl"] == 0
    assert same.metrics["rollout_corr/chi2_seq"] == 0
    assert same.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1)


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout_is": "tokens"},
        {"loss_type": "ppo"},
        {"rollout_is": "token", "rollout_is_threshold": "a"},
        {"rollout_is": "token", "rollout_is_threshold": True},
        {"rollout_is": "token", "rollout_is_threshold": -1.0},
        {"rollout_is": "token", "rollout_is_threshold": "2_1"},
        {"rollout_is": "token", "rollout_is_threshold": "1_2_3"},
        {"rollout_rs": "token_k4", "rollout_rs_threshold": 2},
        {"rollout_rs": "token_k1"},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
        {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,2,2"},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rollout_|loss_type"):
        correct(**settings)


def test_bypass_mode_normalises_the_weights_over_its_rows() -> None:
    correction = RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True
    )
    inputs = {"log_prob": RATIO.log() - 1, "old_log_prob": torch.full_like(RATIO, -1.0), "response_mask": MASK}
    loss = bypass_mode(**inputs, advantages=torch.ones_like(RATIO), config=ActorConfig(), rollout_correction=correction)
    weights = loss.per_token / -inputs["log_prob"]
    assert rows(weights * MASK) == rows(torch.tensor([[1.0, 2.0, 0.2], [1.5, 1.0, 0.0]]) / (5.7 / 5))


def test_bypass_mode_without_weights_is_reinforce() -> None:
    """Also of a micro-batch with one token, whose metrics are of this token alone."""
    correction = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce")
    one = torch.tensor([[0, 1, 0], [0, 0, 0]])
    inputs = {"log_prob": RATIO.log() - 1, "old_log_prob": torch.full_like(RATIO, -1.0), "response_mask": one}
    loss = bypass_mode(
        **inputs, advantages=2 * torch.ones_like(RATIO), config=ActorConfig(), rollout_correction=correction
    )
    assert torch.equal(loss.per_token, -2 * inputs["log_prob"])
    assert torch.equal(loss.mask, one)
    for name in ("actor/ppo_kl", "rollout_corr/kl"):
        total, count = loss.metrics[name]
        assert (total / count).item() == pytest.approx(-math.log(3.0))


def test_bypass_mode_hands_over_the_selected_tokens() -> None:
    inputs = {"log_prob": RATIO.log() - 1, "old_log_prob": torch.full_like(RATIO, -1.0), "response_mask": MASK}
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="clip_cov"))
    selected = torch.tensor([[0, 1, 0], [1, 0, 0]])
    loss = bypass_mode(**inputs, advantages=torch.ones_like(RATIO), config=config, selected=selected)
    assert (loss.per_token == 0).tolist() == selected.bool().tolist()


def test_bypass_mode_trains_the_loss_that_is_set_against_the_rollout() -> None:
    inputs = {"log_prob": RATIO.log() - 1, "old_log_prob": torch.full_like(RATIO, -1.0), "response_mask": MASK}
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="sapo"))
    loss = bypass_mode(**inputs, advantages=torch.ones_like(RATIO), config=config)
    direct = call_policy_loss("sapo", **inputs, advantages=torch.ones_like(RATIO), config=config)
    assert (loss.per_token * MASK).tolist() == (direct.per_token * MASK).tolist()
    assert (loss.agg_mode, direct.metrics.items() <= loss.metrics.items()) == (direct.agg_mode, True)
    assert loss.agg_mode is not None


def test_verls_older_bounds_and_veto() -> None:
    lower = correct(rollout_rs="token", rollout_rs_threshold=2.0, rollout_rs_threshold_lower=0.1)
    assert lower.response_mask.tolist() == [[1, 0, 1], [1, 1, 0]]
    vetoed = correct(rollout_token_veto_threshold=0.25)
    assert vetoed.response_mask.tolist() == [[0, 0, 0], [1, 1, 0]]
    assert vetoed.metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5


def test_mismatch_by_hand() -> None:
    ours, theirs = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]]), torch.tensor([[-1.5, -2.0], [-2.0, -9.0]])
    metrics = mismatch_metrics(ours, theirs, torch.tensor([[1, 1], [1, 0]]))
    assert metrics["kl"] == pytest.approx((-0.5 + 0 + 1) / 3)
    assert metrics["training_ppl"] == pytest.approx((math.exp(1.5) + math.exp(3)) / 2)
    assert metrics["log_ppl_diff"] == pytest.approx((-0.25 + 1) / 2)
    assert metrics["chi2_token"] == pytest.approx((math.e + 1 + math.exp(-2)) / 3 - 1)
    assert metrics["chi2_seq"] == pytest.approx((math.e + math.exp(-2)) / 2 - 1)


def test_ratios_of_the_diagnostics_are_at_most_exp_20() -> None:
    ours, theirs = torch.tensor([[0.0, 0.0, 30.0]]), torch.zeros(1, 3)
    metrics = mismatch_metrics(ours, theirs, torch.tensor([[1, 1, 1]]))
    assert metrics["k3_kl"].item() == pytest.approx((math.exp(20) - 21) / 3)
    assert metrics["chi2_token"].item() == pytest.approx((2 + math.exp(40)) / 3 - 1)
    assert metrics["chi2_seq"].item() == pytest.approx(math.exp(40) - 1)


@pytest.mark.parametrize(("num_tokens", "spread"), [(0, math.nan), (1, 0.0)])
def test_probs_diff_of_too_few_tokens(num_tokens: int, spread: float) -> None:
    ours, theirs = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.25, 0.9]]).log()
    mask = torch.tensor([[num_tokens, 0]])
    metrics = probs_diff_metrics(old_log_probs=ours, rollout_log_probs=theirs, response_mask=mask)
    size = 0.25 if num_tokens else math.nan
    prefix = "training/rollout_probs_diff"
    expected = {f"{prefix}_valid": num_tokens, f"{prefix}_max": size, f"{prefix}_mean": size, f"{prefix}_std": spread}
    expected["training/rollout_actor_probs_pearson_corr"] = math.nan
    assert metrics == pytest.approx(expected, nan_ok=True)


def test_probs_diff_by_hand() -> None:
    ours, theirs = torch.tensor([[0.5, 0.2, 0.9]]), torch.tensor([[0.4, 0.4, 0.1]])
    metrics = probs_diff_metrics(
        old_log_probs=ours.log(), rollout_log_probs=theirs.log(), response_mask=torch.tensor([[1, 1, 0]])
    )
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.2)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.15)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(0.1 / 2**0.5)
    perfect = probs_diff_metrics(
        old_log_probs=ours.log(), rollout_log_probs=(ours / 2).log(), response_mask=torch.ones(1, 3)
    )
    assert perfect["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1)
    opposed = probs_diff_metrics(old_log_probs=ours.log(), rollout_log_probs=(1 - ours).log(), response_mask=ours)
    assert opposed["training/rollout_actor_probs_pearson_corr"] == pytest.approx(-1)
