"""Our numbers against verl 0.9.1's own (tests/golden/make_verl_golden.py); differences are in docs/algorithms.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.algorithms.advantage import call_adv_estimator, get_adv_estimator_fn
from rlsys.algorithms.correction import rollout_correction
from rlsys.algorithms.kl import kl_penalty
from rlsys.algorithms.objective import actor_loss
from rlsys.algorithms.value_loss import compute_value_loss
from rlsys.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig
from rlsys.config.schema.algorithm import RolloutCorrectionConfig

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "verl_0_9_1.json").read_text())
CASES = GOLDEN["cases"]

ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 0.97, "lam": 0.9},
    "gae_undiscounted": {"gamma": 1.0, "lam": 1.0},
    "grpo": {},
    "grpo_no_std": {"norm_adv_by_std_in_grpo": False},
    "grpo_passk": {},
    "grpo_passk_no_std": {"norm_adv_by_std_in_grpo": False},
    "rloo": {},
    "reinforce_plus_plus": {"gamma": 0.97},
    "reinforce_plus_plus_baseline": {},
    "remax": {},
    "opo": {},
    "gpg": {},
    "gdpo": {"component_weights": torch.tensor([1.0, 0.5])},
    "optimal_token_baseline": {},
    "optimal_token_baseline_is": {"rollout_is_weights": "is_weights"},
    "tir_optimal_token_baseline": {},
    "tir_optimal_token_baseline_tail": {"handle_zero_tail": False},
}
SUFFIXES = ("_undiscounted", "_no_std", "_is", "_tail")


def _tensors(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = {name: torch.tensor(values) for name, values in case["inputs"].items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in made.items()}


def _close(actual: Tensor, expected: Any, rtol: float = 1e-6) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 2e-6)], ids=["f64", "f32"])
def test_estimator_agrees_with_verl(name: str, case: dict[str, Any], dtype: torch.dtype, rtol: float) -> None:
    inputs: dict[str, Any] = _tensors(case, dtype)
    weights = inputs.pop("is_weights")
    options = {k: weights if isinstance(v, str) else v for k, v in ESTIMATORS[name].items()}
    estimator = name
    for suffix in SUFFIXES:
        estimator = estimator.removesuffix(suffix)
    advantages, returns = call_adv_estimator(estimator, inputs | options)
    expected = case["estimators"][name]
    _close(advantages, expected[0], rtol)
    _close(returns, expected[1], rtol)


def test_grpo_vectorized_is_the_same_function() -> None:
    assert get_adv_estimator_fn("grpo_vectorized") is get_adv_estimator_fn("grpo")


LOSSES = sorted(CASES[0]["losses"])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_and_its_gradient_agree_with_verl(name: str, case: dict[str, Any]) -> None:
    inputs = _tensors(case)
    loss_mode, _, rest = name.partition("/")
    mode, _, weighted = rest.partition("/")
    correction = None
    if loss_mode == "bypass_mode":
        correction = RolloutCorrectionConfig(
            rollout_is="token",
            rollout_rs="seq_mean_k3",
            rollout_rs_threshold="0.6",
            bypass_mode=True,
            loss_type="ppo_clip" if mode == "ppo_clip" else "reinforce",
        )
        mode = "token-mean"
    config = ActorConfig(
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        loss_agg_mode=mode,  # pyrefly: ignore[bad-argument-type]
        policy_loss=PolicyLossConfig(
            loss_mode=loss_mode,
            clip_cov_ratio=1.0,
            clip_cov_lb=0.05,
            clip_cov_ub=2.0,
            kl_cov_ratio=0.2,
            dro_beta=0.7,
        ),
    )
    log_prob = inputs["log_probs"].requires_grad_()
    result = actor_loss(
        config,
        rollout_correction=correction,
        log_prob=log_prob,
        old_log_prob=inputs["old_log_probs"],
        advantages=inputs["advantages"],
        response_mask=inputs["response_mask"],
        rollout_is_weights=inputs["is_weights"] if weighted == "weighted" else None,
    )
    loss = result.total / result.count
    (gradient,) = torch.autograd.grad(loss, log_prob)
    expected_loss, expected_gradient = case["losses"][name]
    _close(loss.detach(), expected_loss)
    _close(gradient, expected_gradient)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("kind", sorted(CASES[0]["kl"]))
def test_kl_penalty_and_its_gradient_agree_with_verl(kind: str, case: dict[str, Any]) -> None:
    inputs = _tensors(case)
    log_prob = inputs["log_probs"].requires_grad_()
    value = kl_penalty(log_prob, inputs["old_log_probs"], kind)
    value.sum().backward()
    _close(value.detach(), case["kl"][kind][0])
    assert log_prob.grad is not None
    _close(log_prob.grad, case["kl"][kind][1])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_value_loss_and_its_gradient_agree_with_verl(case: dict[str, Any]) -> None:
    inputs = _tensors(case)
    vpreds = inputs["sum_pi_squared"].requires_grad_()
    result = compute_value_loss(
        vpreds=vpreds,
        returns=inputs["advantages"],
        values=inputs["values"],
        response_mask=inputs["response_mask"],
        config=CriticConfig(cliprange_value=0.3),
    )
    loss = result.total / result.count
    (gradient,) = torch.autograd.grad(loss, vpreds)
    expected_loss, expected_gradient, expected_clipfrac = case["value_loss"]
    _close(loss.detach(), expected_loss)
    _close(gradient, expected_gradient)
    total, count = result.metrics["critic/vf_clipfrac"]
    assert total / count == pytest.approx(expected_clipfrac, rel=1e-6)


OF_APPLIED_WEIGHTS = {"rollout_corr/rollout_is_max", "rollout_corr/rollout_is_min"}


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("name", sorted(CASES[0]["corrections"]))
def test_rollout_correction_agrees_with_verl(name: str, case: dict[str, Any]) -> None:
    inputs, expected = _tensors(case), case["corrections"][name]
    corrected = rollout_correction(
        old_log_probs=inputs["old_log_probs"],
        rollout_log_probs=inputs["rollout_log_probs"],
        response_mask=inputs["response_mask"],
        config=RolloutCorrectionConfig(**expected["settings"]),
    )
    _close(corrected.response_mask, expected["mask"])
    if expected["weights"] is None:
        assert corrected.weights is None
    else:
        assert corrected.weights is not None
        _close(corrected.weights, expected["weights"])
    assert set(expected["metrics"]) <= set(corrected.metrics)
    for metric, value in expected["metrics"].items():
        if metric not in OF_APPLIED_WEIGHTS:
            tolerance = 2e-5 if metric.endswith("_std") else 2e-6  # verl takes the root of a float32 difference
            assert corrected.metrics[metric] == pytest.approx(value, rel=2e-6, abs=tolerance), metric
