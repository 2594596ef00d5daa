"""On-policy distillation: divergences by hand, the whole objective against plain float64 formulas."""

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.algorithms.distillation import TeacherScores, divergence
from rlsys.algorithms.objective import actor_loss
from rlsys.config.schema.actor import ActorConfig
from rlsys.config.schema.algorithm import DistillationLossConfig

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def loss_config(**settings: Any) -> DistillationLossConfig:
    return DistillationLossConfig(**settings)


def logs(probs: list[list[float]]) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()[None]


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({}, 0.25 * log(2), 0.9 * log(9) - 0.1 * log(8)),
        ({"loss_max_clamp": 0.2}, 0.25 * log(2), 0.2),
        ({"log_prob_min_clamp": -1.0}, (1 - log(2)) * (0.5 - exp(-1)), 0.9 * (log(0.9) + 1) - (1 + log(0.8)) / exp(1)),
    ],
)
def test_forward_kl_over_the_teachers_likeliest_tokens(settings: dict[str, Any], first: float, second: float) -> None:
    policy, teacher = logs([[0.25, 0.5], [0.1, 0.8]]), logs([[0.5, 0.25], [0.9, 0.1]])
    values, sizes = divergence(TeacherScores(loss_config(loss_mode="forward_kl_topk", **settings), policy, teacher))
    assert values[0].tolist() == pytest.approx([first, second])
    assert sizes["student_mass"][0].tolist() == pytest.approx([0.75, 0.9])
    assert sizes["teacher_mass"][0].tolist() == pytest.approx([0.75, 1.0])


def test_an_estimate_is_reported_by_its_size() -> None:
    scores = TeacherScores(loss_config(loss_mode="k1"), torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -2.0]]))
    values, sizes = divergence(scores)
    assert (values.tolist(), sizes["abs_loss"].tolist()) == ([[0.5, 1.0]], [[0.5, 1.0]])
    swapped = divergence(TeacherScores(scores.config, scores.teacher_log_probs, scores.log_probs))
    assert (swapped[0].tolist(), swapped[1]["abs_loss"].tolist()) == ([[-0.5, -1.0]], [[0.5, 1.0]])


def test_without_task_rewards_the_other_terms_have_no_share_even_at_0() -> None:
    log_prob = torch.tensor([[-1.0]], requires_grad=True)
    tensors = {"log_prob": log_prob, "old_log_prob": log_prob.detach(), "advantages": torch.zeros(1, 1)}
    config = loss_config(loss_mode="k2", use_policy_gradient=False, use_task_rewards=False)
    scores = TeacherScores(config, log_prob, torch.tensor([[-1.5]]))
    result = actor_loss(ActorConfig(), **tensors, response_mask=torch.ones(1, 1), teacher=scores)
    assert result.total.item() == pytest.approx(0.125)
    assert torch.autograd.grad(result.total, log_prob)[0].item() == pytest.approx(0.5)
    assert result.metrics["distillation/abs_loss"] == (0.125, 1)


def test_a_forward_kl_that_the_missing_tail_makes_negative_is_0() -> None:
    scores = TeacherScores(loss_config(loss_mode="forward_kl_topk"), logs([[0.6, 0.4]]), logs([[0.3, 0.2]]))
    assert divergence(scores)[0].tolist() == [[0.0]]


def reference(mode: str, policy: Tensor, teacher: Tensor) -> Tensor:
    """Each divergence from its definition."""
    if mode == "forward_kl_topk":
        return (teacher.exp() * (teacher - policy)).sum(-1).clamp(min=0)
    difference = policy - teacher
    return {
        "k1": lambda: difference,
        "abs": lambda: difference.abs(),
        "k2": lambda: difference.square() / 2,
        "k3": lambda: (-difference).exp() + difference - 1,
    }[mode]()


@pytest.mark.parametrize(
    ("mode", "gradient"),
    [
        ("k1", True),
        *((mode, gradient) for mode in ("abs", "k2", "k3", "forward_kl_topk") for gradient in (True, False)),
    ],
)
@pytest.mark.parametrize("task", [True, False])
def test_the_objective_of_a_student(mode: str, gradient: bool, task: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    logits, old = (torch.randn(2, 3, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    teacher = torch.randn(2, 3, 5, generator=draw, dtype=torch.float64).log_softmax(-1)
    policy, ids = logits.log_softmax(-1), teacher.topk(3).indices
    sampled = policy[..., 1]
    pair = (policy.gather(2, ids), teacher.gather(2, ids)) if "topk" in mode else (sampled, teacher[..., 1])
    old_log_prob, advantages = old.log_softmax(-1)[..., 1], torch.randn(2, 3, generator=draw, dtype=torch.float64)
    config = loss_config(
        loss_mode=mode,
        use_policy_gradient=gradient,
        use_task_rewards=task,
        distillation_loss_coef=0.5,
        loss_max_clamp=0.9,
        clip_ratio_low=0.1,
        clip_ratio_high=0.4,
    )
    tensors = {"log_prob": sampled, "old_log_prob": old_log_prob, "advantages": advantages, "response_mask": MASK}
    result = actor_loss(ActorConfig(), **tensors, teacher=TeacherScores(config, *pair))

    def ppo(values: Tensor, low: float, high: float) -> Tensor:
        ratio = (sampled - old_log_prob).exp()
        clipped = torch.maximum(-values * ratio, -values * ratio.clamp(1 - low, 1 + high))
        return torch.where(values < 0, torch.minimum(-values * 3, clipped), clipped)

    values = reference(mode, *pair).clamp(-0.9, 0.9)
    taught = ppo(-values.detach(), 0.1, 0.4) if gradient else values
    expected = ((ppo(advantages, 0.2, 0.2) + 0.5 * taught if task else taught) * MASK).sum()
    torch.testing.assert_close(result.total, expected, rtol=1e-9, atol=1e-12)
    got, wanted = (torch.autograd.grad(total, logits, retain_graph=True)[0] for total in (result.total, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    assert result.metrics["distillation/loss"] == (pytest.approx((taught * MASK).sum().item()), 3)
    assert ("distillation/student_mass" if "topk" in mode else "distillation/abs_loss") in result.metrics
    assert ("distillation/pg_clipfrac" in result.metrics) is gradient
