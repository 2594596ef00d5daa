"""Policy losses: numbers by hand and from scalar formulas, gradients, splits, and the whole objective."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms import policy_loss, register_policy_loss
from rlsys.algorithms.correction import rollout_correction
from rlsys.algorithms.objective import actor_loss
from rlsys.algorithms.policy_loss import (
    PolicyLoss,
    call_policy_loss,
    get_policy_loss_fn,
    select_tokens,
    vanilla,
)
from rlsys.config import load_config
from rlsys.config.schema.actor import ActorConfig, PolicyLossConfig
from rlsys.config.schema.algorithm import RolloutCorrectionConfig
from rlsys.config.vocabulary import LOSS_AGG_MODES, POLICY_LOSSES
from rlsys.utils.errors import ConfigError


def actor_config(loss_mode: str = "vanilla", **values: Any) -> ActorConfig:
    """A section with clip ratios 0.2 and 0.3, unless `values` say otherwise."""
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    return ActorConfig(**{"policy_loss": PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.8), **clip, **values})


CONFIG = actor_config()
COVARIANCE = {"clip_cov", "kl_cov"}
MEANS_OVER_TOKENS = {"kl", "k3_kl", "chi2_token", "rollout_is_mean", "rollout_rs_masked_fraction"}


def one(name: str, ratio: float, advantage: float, config: ActorConfig = CONFIG, old: float = 0.4) -> float:
    """The loss of a single token whose old probability is `old` and whose new one is `ratio * old`."""
    log_prob = torch.tensor([[math.log(ratio * old)]], dtype=torch.float64)
    loss = call_policy_loss(
        name,
        log_prob=log_prob,
        old_log_prob=torch.tensor([[math.log(old)]], dtype=torch.float64),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        response_mask=torch.ones(1, 1),
        config=config,
    )
    return loss.per_token.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, -2.2),  # inside
        (1.5, 2.0, -2.6),  # held at 1 + high
        (0.5, 2.0, -1.0),  # a falling probability is not held for A > 0
        (0.5, -2.0, 1.6),  # held at 1 - low
        (2.0, -2.0, 4.0),  # a rising one is not held for A < 0
        (2.4, -2.0, 4.8),
        (5.0, -2.0, 6.0),  # dual clip at c = 3
    ],
)
def test_vanilla_by_hand(ratio: float, advantage: float, expected: float) -> None:
    assert one("vanilla", ratio, advantage, old=0.1) == pytest.approx(expected)
    if ratio < 5:
        without = actor_config(clip_ratio_c=1e6)
        assert one("vanilla", ratio, advantage, without, old=0.1) == pytest.approx(expected)


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.2, 1.6])
@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_losses_of_one_token_equal_their_formulas(ratio: float, advantage: float) -> None:
    a, log_pi = advantage, math.log(ratio * 0.4)
    held = min(max(ratio, 0.8), 1.3)
    tau = CONFIG.tau_pos if a > 0 else CONFIG.tau_neg
    moved = ratio * 0.4 - 0.4
    inside = moved <= 0.3 if a > 0 else moved >= -0.2
    distance = 0.4 * math.log(1 / ratio) + 0.6 * math.log(0.6 / (1 - ratio * 0.4))
    near = (distance <= 0.3 or ratio <= 1) if a > 0 else (distance <= 0.2 or ratio >= 1)
    log_ratio = math.log(ratio)
    log_held = min(max(log_ratio, -0.2), 0.3)
    geometric = min(log_ratio, log_held) if a > 0 else max(log_ratio, log_held)
    expected = {
        "gspo": max(-a * ratio, -a * held),
        "cispo": -held * a * log_pi,
        "sapo": -a * (4 / tau) / (1 + math.exp(-tau * (ratio - 1))),
        "gpg": -a * log_pi,
        "geo_mean": -a * math.exp(geometric),
        "dro": -(a * log_pi - 0.4 * log_ratio**2),
        "dppo_tv": -a * min(ratio, 3.0) * log_pi * inside,
        "dppo_kl": -a * min(ratio, 3.0) * log_pi * near,
        "kl_cov": -a * ratio + 0.1 * abs(log_ratio),
    }
    for name, value in expected.items():
        assert one(name, ratio, a) == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_a_token_that_was_certain_may_become_a_little_less_so() -> None:
    """Its KL is log(1 / 0.9), which is below the bound 0.2."""
    assert one("dppo_kl", 0.9, -1.0, old=1.0) == pytest.approx(0.9 * math.log(0.9))


def test_huge_ratios_are_bounded() -> None:
    assert one("gspo", math.exp(12), -2.0) == pytest.approx(2 * math.exp(10))
    falling = torch.full((1, 1), -30.0)
    loss = vanilla(
        log_prob=falling, old_log_prob=0 * falling, advantages=falling, response_mask=torch.ones(1, 1), config=CONFIG
    )
    assert loss.metrics["actor/ppo_kl"] == (20, 1)


def test_sequence_losses_use_the_geometric_mean_of_the_row() -> None:
    log_ratio = torch.tensor([[0.1, 0.5, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    inputs: dict[str, Any] = {
        "log_prob": log_ratio - 1,
        "old_log_prob": torch.full_like(log_ratio, -1.0),
        "advantages": torch.full_like(log_ratio, -2.0),
        "response_mask": mask,
        "config": CONFIG,
    }
    assert call_policy_loss("gspo", **inputs).per_token[0, :2].tolist() == pytest.approx([2 * math.exp(0.3)] * 2)
    wide = actor_config(clip_ratio_high=1.0)
    geometric = call_policy_loss("geo_mean", **(inputs | {"config": wide}))
    assert geometric.per_token[0, :2].tolist() == pytest.approx([2 * math.exp(0.3)] * 2)
    assert geometric.agg_mode == "seq-mean-token-mean"
    weights = torch.tensor([[0.0, 4.0, 9.0]], dtype=torch.float64)
    weighted = call_policy_loss("geo_mean", **(inputs | {"config": wide, "rollout_is_weights": weights}))
    assert weighted.per_token[0, 0].item() == pytest.approx(2 * math.exp(0.3) * (1e-10 * 4) ** 0.5, rel=1e-6)


def test_gradients_reach_only_the_tokens_that_each_loss_means() -> None:
    """One token far above the clip with A > 0: PPO gives it no gradient, CISPO keeps sg(clip) * A, DPPO-TV drops it."""
    gradients = {}
    for name in ("vanilla", "cispo", "dppo_tv", "gpg"):
        log_prob = torch.tensor([[math.log(0.9)]], dtype=torch.float64, requires_grad=True)
        loss = call_policy_loss(
            name,
            log_prob=log_prob,
            old_log_prob=torch.tensor([[math.log(0.3)]], dtype=torch.float64),
            advantages=torch.tensor([[2.0]], dtype=torch.float64),
            response_mask=torch.ones(1, 1),
            config=CONFIG,
        )
        loss.per_token.sum().backward()
        assert log_prob.grad is not None
        gradients[name] = log_prob.grad.item()
    assert gradients == pytest.approx({"vanilla": 0, "cispo": -1.3 * 2, "dppo_tv": 0, "gpg": -2})


def batch(seed: int = 0, rows: int = 6, tokens: int = 8) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, tokens, generator=draw) > 0.3).long()
    mask[:, 0] = 1

    def normal() -> Tensor:
        return torch.randn(rows, tokens, generator=draw, dtype=torch.float64)

    old = -normal().abs() * mask
    return {
        "log_prob": (old + 0.3 * normal()) * mask,
        "old_log_prob": old,
        "advantages": normal() * mask,
        "response_mask": mask,
        "rollout_is_weights": normal().abs() * mask,
        "ref_log_prob": -normal().abs() * mask,
        "entropy": normal().abs() * mask,
        "selected": (torch.rand(rows, tokens, generator=draw) > 0.8) & mask.bool(),
    }


def test_dro_refuses_to_guess_its_weight() -> None:
    with pytest.raises(ValueError, match="dro_beta"):
        one("dro", 1.0, 1.0, ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dro")))
    with pytest.raises(ConfigError, match="dro_beta"):
        load_config(["--config-name=quickstart", "actor_rollout_ref.actor.policy_loss.loss_mode=dro"])


SMOOTH = ["gpg", "dro", "sapo"]


@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradient_of_a_smooth_loss_is_that_of_finite_differences(name: str) -> None:
    inputs = batch()
    config = actor_config(name)
    inputs.pop("entropy")

    def loss(log_prob: Tensor) -> Tensor:
        result = actor_loss(config, **(inputs | {"log_prob": log_prob}))
        return result.total / result.count

    assert torch.autograd.gradcheck(loss, inputs["log_prob"].clone().requires_grad_(), atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(set(POLICY_LOSSES))),
    mode=st.sampled_from(["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]),
    seed=st.integers(0, 1000),
    cut=st.integers(1, 5),
)
def test_splitting_rows_changes_neither_loss_nor_gradient_nor_metrics(
    name: str, mode: str, seed: int, cut: int
) -> None:
    inputs = batch(seed)
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold="0.1")
    config = actor_config(
        name,
        loss_agg_mode=mode,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    if name == "bypass_mode":
        inputs.pop("rollout_is_weights")
    inputs["log_prob"].requires_grad_()

    def add(parts: list[tuple[int, int]]) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
        split = [{k: v[a:b] for k, v in inputs.items()} for a, b in parts]
        results = [actor_loss(config, **rows, rollout_correction=correction, batch_rows=6) for rows in split]
        loss = sum(r.total for r in results) / sum(r.count for r in results)
        (gradient,) = torch.autograd.grad(loss, inputs["log_prob"])
        metrics = {key: [float(sum(r.metrics[key][i] for r in results)) for i in (0, 1)] for key in results[0].metrics}
        return loss.detach(), gradient, metrics

    whole, parts = add([(0, 6)]), add([(0, cut), (cut, 6)])
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-12, atol=1e-12)
    for key, pair in whole[2].items():
        if key.startswith("rollout_corr/") and key.removeprefix("rollout_corr/") not in MEANS_OVER_TOKENS:
            continue  # maxima and perplexities of the micro-batches
        assert parts[2][key] == pytest.approx(pair, rel=1e-9, abs=1e-9), key


def test_the_terms_of_the_objective_add_up() -> None:
    inputs = batch()
    plain = {k: inputs[k] for k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    mask = inputs["response_mask"]
    both = actor_config(entropy_coeff=0.5, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="k2")
    result = actor_loss(both, **plain, entropy=inputs["entropy"], ref_log_prob=inputs["ref_log_prob"])
    policy = actor_loss(CONFIG, **plain)
    kl = (0.5 * (inputs["log_prob"] - inputs["ref_log_prob"]).square() * mask).sum()
    expected = policy.total + 2 * kl - 0.5 * (inputs["entropy"] * mask).sum()
    torch.testing.assert_close(result.total, expected)
    assert result.count == mask.sum().item()
    assert result.metrics["actor/kl_loss"][0] == pytest.approx(kl.item())
    assert result.metrics["actor/entropy"][0] == pytest.approx((inputs["entropy"] * mask).sum().item())
    k3 = actor_loss(actor_config(use_kl_loss=True), **plain, ref_log_prob=inputs["ref_log_prob"]).metrics
    log_ratio = (inputs["ref_log_prob"] - inputs["log_prob"])[mask.bool()]  # q / p - log(q / p) - 1
    assert k3["actor/kl_loss"][0] == pytest.approx((log_ratio.exp() - log_ratio - 1).clamp(max=10).sum().item())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_entropy_reported_is_that_of_a_token_however_losses_are_averaged(mode: str) -> None:
    inputs = batch()
    plain = {k: inputs[k] for k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    total, count = actor_loss(actor_config(loss_agg_mode=mode), **plain, entropy=inputs["entropy"]).metrics[
        "actor/entropy"
    ]
    assert float(total / count) == pytest.approx(inputs["entropy"][inputs["response_mask"].bool()].mean().item())


def test_the_objective_divides_by_the_scale_and_bypasses_only_when_asked() -> None:
    plain = {k: v for k, v in batch().items() if k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    by_row, scaled = (
        actor_loss(actor_config(loss_agg_mode=mode, loss_scale_factor=10.0), **plain)
        for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm")
    )
    torch.testing.assert_close(scaled.total, by_row.total / 10)
    rejects = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold="0.02")
    with_correction = actor_loss(CONFIG, **plain, rollout_correction=rejects)
    assert with_correction.total == actor_loss(CONFIG, **plain).total
    assert not any(name.startswith("rollout_corr/") for name in with_correction.metrics)


def test_metrics_are_exact_counts() -> None:
    log_ratio = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    result = actor_loss(
        CONFIG,
        log_prob=log_ratio,
        old_log_prob=torch.zeros_like(log_ratio),
        advantages=advantages,
        response_mask=mask,
    )
    assert result.metrics["actor/pg_clipfrac"] == (1, 4)
    assert result.metrics["actor/pg_clipfrac_lower"] == (1, 4)
    assert result.metrics["actor/ppo_kl"] == (-3, 4)


@pytest.mark.parametrize(
    ("name", "clipped", "lower"),
    [
        ("vanilla", 3, 1),
        ("gspo", 3, 0),  # the row's ratio is 2 ** 0.4
        ("cispo", 5, 0),
        ("sapo", 0, 0),
        ("gpg", 0, 0),
        ("geo_mean", 3, 2),
        ("dro", 0, 0),
        ("dppo_tv", 3, 1),
        ("dppo_kl", 3, 1),
        ("clip_cov", 1, None),
        ("kl_cov", None, None),
    ],
)
def test_metrics_of_every_loss_by_hand(name: str, clipped: int | None, lower: int | None) -> None:
    """Five tokens and one outside the mask; a bound of 0.04 below and 0.08 above, of 3 for the dual clip."""
    ratio = torch.tensor([[0.5, 0.5, 2.0, 4.0, 2.0, 9.0]], dtype=torch.float64)
    loss = call_policy_loss(
        name,
        log_prob=(0.2 * ratio).log().requires_grad_(),
        old_log_prob=torch.full_like(ratio, 0.2).log(),
        advantages=torch.tensor([[2.0, -1.0, 0.5, -1.0, 1.0, 1.0]], dtype=torch.float64),
        response_mask=torch.tensor([[1, 1, 1, 1, 1, 0]]),
        config=actor_config(name, clip_ratio_low=0.04, clip_ratio_high=0.08),
        selected=torch.tensor([[0, 0, 1, 0, 0, 1]]),
    )
    kl = (6 if name == "kl_cov" else -2) * math.log(2)
    expected = {"ppo_kl": (pytest.approx(kl), 5), "pg_clipfrac": (clipped, 5), "pg_clipfrac_lower": (lower, 5)}
    assert loss.metrics == {f"actor/{key}": pair for key, pair in expected.items() if pair[0] is not None}
    assert not any(total.requires_grad for total, _ in loss.metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_rows_without_tokens_and_huge_ratios_stay_finite(name: str) -> None:
    inputs = batch()
    inputs["response_mask"][2] = 0
    inputs["old_log_prob"] = (
        inputs["old_log_prob"] - 95 * (inputs["response_mask"] == 1) * (torch.arange(6) == 1)[:, None]
    )
    log_prob = inputs["log_prob"].float().requires_grad_()
    floats = {k: v.float() for k, v in inputs.items() if k in ("old_log_prob", "advantages")}
    mask = inputs["response_mask"]
    result = actor_loss(actor_config(name), log_prob=log_prob, response_mask=mask, **floats)
    (gradient,) = torch.autograd.grad(result.total, log_prob)
    assert torch.isfinite(result.total)
    assert torch.isfinite(gradient).all()
    assert (gradient[2] == 0).all()


class TestCovarianceLosses:
    def test_kl_cov_penalises_the_largest_share(self) -> None:
        inputs = batch()
        config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=1.0))
        mask = inputs["response_mask"].bool()
        adv, logp = inputs["advantages"], inputs["old_log_prob"]
        covariance = ((adv - adv[mask].mean()) * (logp - logp[mask].mean())).masked_fill(~mask, -torch.inf)
        chosen = select_tokens(config, old_log_probs=logp, advantages=adv, response_mask=mask.long(), seed=0)
        assert chosen is not None
        wanted = int(0.1 * mask.sum())
        assert chosen.sum() == wanted
        assert set(covariance[chosen].tolist()) == set(covariance.flatten().topk(wanted).values.tolist())

    def test_clip_cov_draws_within_the_bounds_reproducibly(self) -> None:
        inputs = batch(rows=40)
        loss = PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=0.05, clip_cov_lb=0.1, clip_cov_ub=1.0)
        config = ActorConfig(policy_loss=loss)
        mask = inputs["response_mask"]
        keys = {
            "old_log_probs": inputs["old_log_prob"],
            "advantages": inputs["advantages"],
            "response_mask": mask,
        }
        first = select_tokens(config, seed=0, **keys)
        again = select_tokens(config, seed=0, **keys)
        other = select_tokens(config, seed=1, **keys)
        assert first is not None
        assert again is not None
        assert other is not None
        assert first.sum() == int(0.05 * mask.sum())
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        adv, logp, on = inputs["advantages"], inputs["old_log_prob"], mask.bool()
        covariance = (adv - adv[on].mean()) * (logp - logp[on].mean())
        assert ((covariance[first] > 0.1) & (covariance[first] < 1.0)).all()

    @pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
    def test_at_least_one_token_is_selected(self, name: str) -> None:
        loss = PolicyLossConfig(
            loss_mode=name, clip_cov_ratio=1e-6, clip_cov_lb=0.0, clip_cov_ub=9.0, kl_cov_ratio=1e-6
        )
        keys = {"old_log_probs": batch()["old_log_prob"], "advantages": batch()["advantages"]}
        chosen = select_tokens(ActorConfig(policy_loss=loss), **keys, response_mask=batch()["response_mask"], seed=0)
        assert chosen is not None
        assert chosen.sum() == 1

    def test_selected_tokens_have_no_gradient_in_clip_cov(self) -> None:
        inputs = batch()
        log_prob = inputs["log_prob"].requires_grad_()
        keys = {k: inputs[k] for k in ("old_log_prob", "advantages", "response_mask", "selected")}
        actor_loss(actor_config("clip_cov"), log_prob=log_prob, **keys).total.backward()
        assert log_prob.grad is not None
        assert (log_prob.grad[inputs["selected"]] == 0).all()
        assert (
            select_tokens(
                CONFIG,
                old_log_probs=inputs["old_log_prob"],
                advantages=inputs["advantages"],
                response_mask=inputs["response_mask"],
                seed=0,
            )
            is None
        )


class TestBypass:
    def test_rejected_tokens_leave_the_sum_but_not_the_count(self) -> None:
        inputs = {k: v for k, v in batch().items() if k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
        correction = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold="0.02", bypass_mode=True)
        result = actor_loss(CONFIG, **inputs, rollout_correction=correction)
        kept = (0.5 * (inputs["log_prob"] - inputs["old_log_prob"]).square() <= 0.02) & inputs["response_mask"].bool()
        per_token = vanilla(**inputs, config=CONFIG).per_token
        torch.testing.assert_close(result.total, (per_token * kept).sum())
        assert result.count == inputs["response_mask"].sum().item()
        rejected = inputs["response_mask"].sum().item() - kept.sum().item()
        sums = result.metrics["rollout_corr/rollout_rs_masked_fraction"]
        assert sums == (pytest.approx(rejected), result.count)

    def test_metrics_are_those_of_the_correction_and_rows_without_tokens_have_no_weight(self) -> None:
        inputs = {k: v for k, v in batch().items() if k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
        correction = RolloutCorrectionConfig(
            rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold="0.02", bypass_mode=True
        )
        same = rollout_correction(
            old_log_probs=inputs["log_prob"],
            rollout_log_probs=inputs["old_log_prob"],
            response_mask=inputs["response_mask"],
            config=correction,
        )
        metrics = actor_loss(CONFIG, **inputs, rollout_correction=correction).metrics
        means = {key: total / count for key, (total, count) in metrics.items() if key.startswith("rollout_corr/")}
        assert means == pytest.approx(same.metrics)
        assert {"rollout_corr/chi2_seq", "rollout_corr/rollout_rs_token_k2_seq_std"} < set(means)
        empty = inputs | {"response_mask": torch.zeros_like(inputs["response_mask"])}
        nothing = actor_loss(CONFIG, **empty, rollout_correction=correction)
        assert (nothing.total.item(), nothing.count) == (0.0, 0.0)
        assert {key: nothing.metrics[key] for key in means} == dict.fromkeys(means, (0.0, 0.0))

    def test_reinforce_weighs_by_the_truncated_ratio_without_its_gradient(self) -> None:
        correction = RolloutCorrectionConfig(
            rollout_is="token", rollout_is_threshold="1.2", bypass_mode=True, loss_type="reinforce"
        )
        log_prob = torch.tensor([[0.1, 1.0]], dtype=torch.float64, requires_grad=True)
        result = actor_loss(
            CONFIG,
            rollout_correction=correction,
            log_prob=log_prob,
            old_log_prob=torch.zeros(1, 2, dtype=torch.float64),
            advantages=torch.tensor([[2.0, 3.0]], dtype=torch.float64),
            response_mask=torch.ones(1, 2),
        )
        result.total.backward()
        assert log_prob.grad is not None
        assert log_prob.grad[0].tolist() == pytest.approx([-2 * math.exp(0.1), -3 * 1.2])


def test_a_plug_in_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_loss._LOSSES, "_functions", dict(policy_loss._LOSSES._functions))

    @register_policy_loss("test_loss")
    def mine(*, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> PolicyLoss:
        return PolicyLoss(-log_prob * advantages, response_mask)

    inputs = {k: batch()[k] for k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    assert get_policy_loss_fn("test_loss") is mine
    ours, gpg = (actor_loss(actor_config(name), **inputs) for name in ("test_loss", "gpg"))
    torch.testing.assert_close(ours.total, gpg.total)


def test_importance_weights_multiply_a_loss_that_does_not_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_loss._LOSSES, "_functions", dict(policy_loss._LOSSES._functions))

    @register_policy_loss("test_loss")
    def mine(*, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> PolicyLoss:
        return PolicyLoss(-log_prob * advantages, response_mask)

    @register_policy_loss("test_loss_with_weights")
    def weighs_itself(
        *, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, rollout_is_weights: Tensor
    ) -> PolicyLoss:
        return PolicyLoss(-log_prob * advantages * rollout_is_weights, response_mask)

    names = ("log_prob", "old_log_prob", "advantages", "response_mask", "rollout_is_weights")
    inputs = {k: batch()[k] for k in names}
    expected = -inputs["log_prob"] * inputs["advantages"] * inputs["rollout_is_weights"]
    for name in ("test_loss", "test_loss_with_weights", "gpg"):
        torch.testing.assert_close(call_policy_loss(name, config=CONFIG, **inputs).per_token, expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_ratio_c": 1.0}, "clip_ratio_c"),
        ({"tau_neg": 0.0}, "tau_neg"),
        ({"loss_mode": "vanila"}, "did you mean 'vanilla'"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
        ({"kl_loss_type": "full"}, "kl_loss_type"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    inputs = {k: batch()[k] for k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    with pytest.raises(ValueError, match=message):
        actor_loss(actor_config(**values), **inputs)


def test_missing_terms_are_reported() -> None:
    inputs = {k: batch()[k] for k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    with pytest.raises(ValueError, match="ref_log_prob"):
        actor_loss(actor_config(use_kl_loss=True), **inputs)
    with pytest.raises(ValueError, match="entropy"):
        actor_loss(actor_config(entropy_coeff=0.1), **inputs)
