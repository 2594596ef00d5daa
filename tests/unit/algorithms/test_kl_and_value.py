"""KL estimators, the KL in the reward, its controllers, and the critic's loss."""

import math

import pytest
import torch

from rlsys.algorithms.kl import KLController, kl_penalty
from rlsys.algorithms.stages import apply_kl_penalty
from rlsys.algorithms.value_loss import compute_value_loss
from rlsys.config.schema.actor import CriticConfig
from rlsys.config.schema.algorithm import KLControlConfig
from rlsys.protocol import DataProto


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", 0.5),
        ("k1", 0.5),
        ("abs", 0.5),
        ("mse", 0.125),
        ("k2", 0.125),
        ("k3", math.exp(-0.5) + 0.5 - 1),
        ("low_var_kl", math.exp(-0.5) + 0.5 - 1),
        ("k1+", 0.5),
        ("k3+", math.exp(-0.5) + 0.5 - 1),
    ],
)
def test_estimators_by_hand(kind: str, expected: float) -> None:
    log_prob, ref = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[-1.5]], dtype=torch.float64)
    assert kl_penalty(log_prob, ref, kind).item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["k1+", "abs+", "k3+", "mse", "mse+", "k2"])
def test_straight_through_forms_have_the_gradient_of_k2(kind: str) -> None:
    log_prob = torch.tensor([[-1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.5, -2.0]], dtype=torch.float64)
    kl_penalty(log_prob, ref, kind).sum().backward()
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, (log_prob - ref).detach())


def test_k1_and_k3_are_unbiased() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, ref_logits = (torch.randn(1, 1, 5, generator=draw, dtype=torch.float64) / 2 for _ in range(2))
    log_p, log_q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)
    for kind in ("k1", "k3"):
        expectation = (log_p.exp() * kl_penalty(log_p, log_q, kind)).sum(-1)
        torch.testing.assert_close(expectation, exact)


def test_the_expected_gradient_of_k3_plus_is_that_of_the_kl_and_of_k3_is_not() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=draw, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, generator=draw, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)
    got = {}
    for kind in ("k3+", "k3"):
        sampled = (log_p.exp().detach() * kl_penalty(log_p, ref, kind)).sum()
        (got[kind],) = torch.autograd.grad(sampled, logits, retain_graph=True)
    torch.testing.assert_close(got["k3+"], exact)
    assert (got["k3"] - exact).abs().max() > 0.01


def test_k3_is_bounded_and_unknown_kinds_are_refused() -> None:
    far = kl_penalty(torch.tensor([[-50.0]]), torch.tensor([[-1.0]]), "k3")
    assert far.item() == 10
    log_prob = torch.tensor([[-300.0, -1.0]], requires_grad=True)
    kl_penalty(log_prob, torch.tensor([[-1.0, -300.0]]), "k3").sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[0, 0]]  # exp(299) is no float32
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


def test_kl_in_reward_by_hand() -> None:
    columns = {
        "token_level_scores": torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, -9.0]]),
        "ref_log_prob": torch.tensor([[-1.5, -2.0], [-1.0, torch.nan]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    batch, metrics = apply_kl_penalty(DataProto.from_dict(columns), KLController(KLControlConfig(kl_coef=0.1)))
    torch.testing.assert_close(batch.tensors["token_level_rewards"], torch.tensor([[-0.05, 0.9], [2.0, 0.0]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.75 + 0) / 2)


def test_adaptive_controller_by_hand_and_through_a_checkpoint() -> None:
    config = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=6.0, horizon=100)
    controller = KLController(config)
    controller.update(current_kl=6.6, n_steps=10)
    assert controller.value == pytest.approx(0.2 * (1 + 0.1 * 10 / 100))
    controller.update(current_kl=600.0, n_steps=10)
    value = 0.2 * 1.01 * (1 + 0.2 * 0.1)
    assert controller.value == pytest.approx(value)
    controller.update(current_kl=0.0, n_steps=10)
    value *= 1 - 0.2 * 0.1
    assert controller.value == pytest.approx(value)
    resumed = KLController(config)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value


def test_fixed_controller_stays() -> None:
    controller = KLController(KLControlConfig(kl_coef=0.3))
    controller.update(current_kl=100.0, n_steps=10)
    controller.load_state_dict({"value": 0.7})
    assert controller.value == 0.3
    for wrong in ({"type": "adaptve"}, {"type": "adaptive", "horizon": 0}):
        with pytest.raises(ValueError, match=r"type|horizon"):
            KLControlConfig(**wrong)  # pyrefly: ignore[bad-argument-type]


def test_value_loss_by_hand() -> None:
    """v = 2, old 1, clip 0.5 -> held at 1.5; R = 1.6: max(0.16, 0.01) / 2. R = 3: max(1, 2.25) / 2, clipped."""
    result = compute_value_loss(
        vpreds=torch.tensor([[2.0, 2.0, torch.nan]]),
        returns=torch.tensor([[1.6, 3.0, 0.0]]),
        values=torch.tensor([[1.0, 1.0, 0.0]]),
        response_mask=torch.tensor([[1, 1, 0]]),
        config=CriticConfig(cliprange_value=0.5),
    )
    assert (result.total / result.count).item() == pytest.approx((0.08 + 1.125) / 2)
    assert result.metrics["critic/vf_clipfrac"] == (1, 2)
    assert result.metrics["critic/vpred_mean"] == (4, 2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 6 / 3), ("token-sum", 6 / (2 / 8)), ("seq-mean-token-sum-norm", 6 / 10 / 2)],
)
def test_the_value_loss_is_aggregated_as_the_policys(mode: str, expected: float) -> None:
    """Errors of 2 at two tokens and at one more: halves of squares of 2 each; 2 of 8 rows, a scale of 10."""
    zeros = torch.zeros(2, 2)
    config = CriticConfig(loss_agg_mode=mode, loss_scale_factor=10.0, cliprange_value=9.0)  # pyrefly: ignore
    mask = torch.tensor([[1, 1], [1, 0]])
    loss = compute_value_loss(
        vpreds=zeros + 2, returns=zeros, values=zeros, response_mask=mask, config=config, batch_rows=8
    )
    assert (loss.total / loss.count).item() == pytest.approx(expected)


def test_value_gradient_is_that_of_finite_differences() -> None:
    draw = torch.Generator().manual_seed(0)
    vpreds, returns, values = (torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(3, 4, generator=draw) > 0.3).long()

    def loss(v: torch.Tensor) -> torch.Tensor:
        return compute_value_loss(
            vpreds=v, returns=returns, values=values, response_mask=mask, config=CriticConfig(cliprange_value=0.4)
        ).total

    assert torch.autograd.gradcheck(loss, vpreds.requires_grad_())
