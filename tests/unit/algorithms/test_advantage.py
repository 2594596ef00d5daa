"""Estimators: numbers by hand, edge cases, invariances."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.algorithms import advantage, register_adv_est
from rlsys.algorithms.advantage import (
    call_adv_estimator,
    estimator_takes,
    gae,
    get_adv_estimator_fn,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    rloo,
)
from rlsys.algorithms.groups import group_ids_of, rank_in_group, second_largest
from rlsys.config.vocabulary import ADV_ESTIMATORS


def outcome(scores: list[float], mask: Tensor) -> Tensor:
    rewards = torch.zeros(mask.shape)
    for row, score in enumerate(scores):
        rewards[row, max(int(mask[row].sum()) - 1, 0)] = score
    return rewards


def first(advantages: Tensor) -> list[float]:
    return [round(x, 5) for x in advantages[:, 0].tolist()]


FULL = torch.ones(4, 3, dtype=torch.int64)
PAIRS = torch.tensor([0, 1, 0, 1])


def everything(rows: int, tokens: int, seed: int = 0, groups: int = 3) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, tokens, generator=draw) > 0.3).long()
    mask[:, 0] = 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return {
        "token_level_rewards": normal(rows, tokens) * mask,
        "response_mask": mask,
        "group_ids": torch.arange(rows) % groups,
        "values": normal(rows, tokens),
        "reward_baselines": normal(rows),
        "component_scores": normal(rows, 2),
        "old_log_probs": -normal(rows, tokens).abs(),
        "sum_pi_squared": torch.rand(rows, tokens, generator=draw),
        "gamma": 0.99,
        "lam": 0.95,
    }


def test_gae_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25]])
    advantages, returns = gae(
        token_level_rewards=rewards, values=values, response_mask=torch.ones(1, 2), gamma=0.9, lam=0.8, whiten=False
    )
    last = 1 - 0.25
    before = (0 + 0.9 * 0.25 - 0.5) + 0.9 * 0.8 * last
    torch.testing.assert_close(advantages, torch.tensor([[before, last]]))
    torch.testing.assert_close(returns, torch.tensor([[before + 0.5, 1.0]]))


def test_gae_passes_over_observations() -> None:
    """With tool output in the middle the two turns join as if the tokens between were not there."""
    mask = torch.tensor([[1, 0, 0, 1]])
    rewards = torch.tensor([[0.0, 9.0, 9.0, 1.0]])
    values = torch.tensor([[0.5, 7.0, 7.0, 0.25]])
    apart, _ = gae(token_level_rewards=rewards, values=values, response_mask=mask, gamma=0.9, lam=0.8, whiten=False)
    joined, _ = gae(
        token_level_rewards=rewards[:, [0, 3]],
        values=values[:, [0, 3]],
        response_mask=mask[:, [0, 3]],
        gamma=0.9,
        lam=0.8,
        whiten=False,
    )
    torch.testing.assert_close(apart[:, [0, 3]], joined)
    assert apart[0, 1:3].tolist() == [0, 0]


def test_gae_without_lambda_is_the_error_of_one_step() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    advantages, _ = gae(
        token_level_rewards=rewards, values=values, response_mask=FULL[:1, :2], gamma=0.8, lam=0.0, whiten=False
    )
    assert advantages.tolist() == [pytest.approx([0.8 * 0.25 - 0.5, 1 - 0.25])]


def test_large_values_cancel_in_float64() -> None:
    """With lam = 1 the return is the discounted reward, whatever the values are; 12345679 * 0.9 is no float32."""
    values, rewards = torch.tensor([[7.0, 12345679.0]]), torch.tensor([[0.0, 1.0]])
    _, returns = gae(token_level_rewards=rewards, values=values, response_mask=FULL[:1, :2], gamma=0.9, whiten=False)
    assert returns.tolist() == [pytest.approx([0.9, 1.0], rel=1e-6)]


@pytest.mark.parametrize("holes", [False, True])
def test_gae_equals_a_float64_loop(holes: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(4, 200, generator=draw) > 0.3
    mask = mask if holes else mask.cummin(dim=1).values
    rewards, values = (torch.randn(4, 200, generator=draw) for _ in range(2))
    got, got_returns = gae(
        token_level_rewards=rewards, values=values, response_mask=mask, gamma=0.98, lam=0.9, whiten=False
    )
    for row in range(4):
        following, running = 0.0, 0.0
        for t in reversed(range(200)):
            if not mask[row, t]:
                assert got[row, t] == 0
                continue
            value = values[row, t].item()
            running = rewards[row, t].item() + 0.98 * following - value + 0.98 * 0.9 * running
            following = value
            assert got[row, t].item() == pytest.approx(running, rel=1e-6, abs=1e-6)
            assert got_returns[row, t].item() == pytest.approx(running + value, rel=1e-6, abs=1e-6)


def test_whitened_advantages_have_mean_0_and_deviation_1() -> None:
    inputs = everything(6, 20)
    for name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        advantages, _ = call_adv_estimator(name, inputs)
        counted = advantages[inputs["response_mask"].bool()].double()
        assert counted.mean().item() == pytest.approx(0, abs=1e-6)
        assert counted.std().item() == pytest.approx(1, rel=1e-5)


def test_grpo_by_hand() -> None:
    rewards = outcome([1.0, 5.0, 3.0, 5.0], FULL)
    common = {"token_level_rewards": rewards, "response_mask": FULL, "group_ids": PAIRS}
    assert first(grpo(**common)[0]) == [round(-1 / 2**0.5, 5), 0, round(1 / 2**0.5, 5), 0]
    assert first(grpo(**common, norm_adv_by_std_in_grpo=False)[0]) == [-1, 0, 1, 0]
    assert first(rloo(**common)[0]) == [-2, 0, 2, 0]
    assert first(grpo_passk(**common, norm_adv_by_std_in_grpo=False)[0]) == [0, 0, 2, 0]


def test_rloo_vectorized_differs_in_groups_of_one_only() -> None:
    rewards, groups = torch.tensor([[1.0], [3.0], [8.0], [1.2]]), torch.tensor([0, 0, 0, 1])
    inputs = {"token_level_rewards": rewards, "response_mask": torch.ones(4, 1), "group_ids": groups}
    assert call_adv_estimator("rloo", inputs)[0].flatten().tolist() == pytest.approx([-4.5, -1.5, 6.0, 1.2])
    assert call_adv_estimator("rloo_vectorized", inputs)[0].flatten().tolist() == pytest.approx([-4.5, -1.5, 6.0, 0.0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg"])
def test_a_group_of_one_keeps_its_outcome(name: str) -> None:
    rewards = outcome([2.0, 5.0, 7.0, 9.0], FULL)
    inputs = {"token_level_rewards": rewards, "response_mask": FULL, "group_ids": torch.arange(4)}
    assert call_adv_estimator(name, inputs)[0][:, 0].tolist() == pytest.approx([2, 5, 7, 9], rel=1e-5)


def test_opo_weighs_by_length() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    rewards = outcome([1.0, 2.0], mask)
    advantages, _ = opo(token_level_rewards=rewards, response_mask=mask, group_ids=torch.zeros(2, dtype=torch.int64))
    baseline = (1 * 1 + 3 * 2) / 4
    assert first(advantages) == [1 - baseline, 2 - baseline]


def test_gpg_scales_by_rows_with_a_reward() -> None:
    advantages, _ = call_adv_estimator(
        "gpg", {"token_level_rewards": outcome([0, 4, 0, 2], FULL), "response_mask": FULL, "group_ids": PAIRS}
    )
    assert first(advantages) == [0, 2 * (4 - 3), 0, 2 * (2 - 3)]


def test_gpg_without_any_reward_has_no_advantage() -> None:
    inputs = {"token_level_rewards": torch.zeros(4, 3), "response_mask": FULL, "group_ids": PAIRS}
    assert (call_adv_estimator("gpg", inputs)[0] == 0).all()


def test_remax_subtracts_the_greedy_reward_from_the_return() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    inputs = {"token_level_rewards": rewards, "response_mask": FULL[:1], "reward_baselines": torch.tensor([4.0])}
    advantages, returns = call_adv_estimator("remax", inputs)
    assert returns.tolist() == [[6, 5, 3]]
    assert advantages.tolist() == [[2, 1, -1]]


def test_gdpo_keeps_a_small_component_alive() -> None:
    """Summed first, the component of scale 100 would drown the one of scale 1."""
    components = torch.tensor([[100.0, 0.0], [100.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    inputs = {
        "token_level_rewards": outcome(components.sum(1).tolist(), FULL),
        "response_mask": FULL,
        "group_ids": torch.zeros(4, dtype=torch.int64),
        "component_scores": components,
        "whiten": False,
    }
    advantages = first(call_adv_estimator("gdpo", inputs)[0])
    expected = 0.5 / (1 / 3) ** 0.5
    assert advantages == pytest.approx([0, 2 * expected, -2 * expected, 0], abs=1e-4)


def test_optimal_token_baseline_by_hand() -> None:
    """Two rows of one token: B = (1 * w1 + 3 * w2) / (w1 + w2), w = 1 - 2 pi + sum pi^2."""
    probs, squares = torch.tensor([[0.5], [0.25]]), torch.tensor([[0.5], [0.4]])
    w1, w2 = 1 - 1 + 0.5, 1 - 0.5 + 0.4
    inputs = {
        "token_level_rewards": torch.tensor([[1.0], [3.0]]),
        "response_mask": torch.ones(2, 1, dtype=torch.int64),
        "group_ids": torch.zeros(2, dtype=torch.int64),
        "old_log_probs": probs.log(),
        "sum_pi_squared": squares,
    }
    baseline = (w1 + 3 * w2) / (w1 + w2)
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        advantages, returns = call_adv_estimator(name, inputs)
        assert advantages[:, 0].tolist() == pytest.approx([1 - baseline, 3 - baseline], rel=1e-6)
        assert returns[:, 0].tolist() == [1, 3]


def test_a_group_of_one_has_no_optimal_token_baseline() -> None:
    inputs = everything(3, 4) | {"group_ids": torch.arange(3)}
    advantages, returns = call_adv_estimator("optimal_token_baseline", inputs)
    assert torch.equal(advantages, returns)
    assert returns.any()


def test_reinforce_plus_plus_discounts() -> None:
    advantages, returns = reinforce_plus_plus(
        token_level_rewards=torch.tensor([[0.0, 0.0, 1.0]]), response_mask=FULL[:1], gamma=0.5, whiten=False
    )
    assert returns.tolist() == advantages.tolist() == [[0.25, 0.5, 1.0]]


def test_reinforce_plus_plus_baseline_unwhitened_is_the_lead_over_the_mean() -> None:
    inputs = {"token_level_rewards": outcome([1.0, 5.0, 3.0, 5.0], FULL), "response_mask": FULL, "group_ids": PAIRS}
    advantages, _ = call_adv_estimator("reinforce_plus_plus_baseline", inputs | {"whiten": False})
    assert first(advantages) == [-1, 0, 1, 0]


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
class TestEveryEstimator:
    def test_groups_of_one_equal_rewards_and_empty_rows_give_finite_numbers(self, name: str) -> None:
        inputs = everything(5, 4)
        inputs["group_ids"] = torch.tensor([0, 1, 1, 2, 2])
        inputs["response_mask"][4] = 0
        inputs["token_level_rewards"][1:3] = torch.tensor([0.0, 0.0, 0.0, 0.1])
        inputs["token_level_rewards"][4] = 0
        for result in call_adv_estimator(name, inputs):
            assert torch.isfinite(result).all()
        inputs["response_mask"][:] = 0
        for result in call_adv_estimator(name, inputs):
            assert (result == 0).all()

    def test_nothing_outside_the_mask_matters_and_nothing_appears_there(self, name: str) -> None:
        inputs = everything(6, 10)
        outside = ~inputs["response_mask"].bool()
        clean = call_adv_estimator(name, inputs)
        for key in ("values", "old_log_probs", "sum_pi_squared"):
            inputs[key] = inputs[key].masked_fill(outside, torch.nan)
        dirty = call_adv_estimator(name, inputs)
        for a, b in zip(clean, dirty, strict=True):
            assert (a[outside] == 0).all()
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    def test_padding_columns_change_nothing(self, name: str) -> None:
        inputs = everything(6, 10)
        padded = {
            k: torch.nn.functional.pad(v, (0, 5)) if isinstance(v, Tensor) and v.shape[1:] == (10,) else v
            for k, v in inputs.items()
        }
        for a, b in zip(call_adv_estimator(name, inputs), call_adv_estimator(name, padded), strict=True):
            torch.testing.assert_close(a, b[:, :10], rtol=1e-6, atol=1e-6)

    def test_the_order_of_rows_does_not_matter(self, name: str) -> None:
        inputs = everything(8, 10)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
        moved = {k: v[order] if isinstance(v, Tensor) else v for k, v in inputs.items()}
        for a, b in zip(call_adv_estimator(name, inputs), call_adv_estimator(name, moved), strict=True):
            torch.testing.assert_close(a[order], b, rtol=1e-6, atol=1e-6)

    def test_float32_is_within_1e_6_of_float64(self, name: str) -> None:
        inputs = everything(6, 300)
        wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
        for a, b in zip(call_adv_estimator(name, inputs), call_adv_estimator(name, wide), strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


def test_equal_rewards_give_exactly_no_advantage() -> None:
    """0.1 is not representable: the float32 mean of equal rewards is off by an ulp, which 1e-6 would blow up."""
    mask = torch.ones(7, 2, dtype=torch.int64)
    rewards = outcome([0.1] * 7, mask)
    advantages, _ = grpo(token_level_rewards=rewards, response_mask=mask, group_ids=torch.zeros(7, dtype=torch.int64))
    assert advantages.abs().max() < 1e-9


def test_group_helpers() -> None:
    assert group_ids_of(["b", "a", "b"]).tolist() == [1, 0, 1]
    ids = torch.tensor([0, 0, 1, 0, 2])
    values = torch.tensor([1.0, 3.0, 5.0, 3.0, -1.0])
    assert rank_in_group(values, ids).tolist() == [2, 0, 0, 1, 0]
    assert second_largest(values, ids).tolist() == [3, 3, 5, 3, -1]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(advantage._ESTIMATORS, "_functions", dict(advantage._ESTIMATORS._functions))


@pytest.mark.usefixtures("own_registry")
def test_a_plug_in_is_found_by_name_and_gets_what_it_names() -> None:
    @register_adv_est("test_constant")
    def constant(*, token_level_rewards: Tensor, gamma: float, scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return token_level_rewards * gamma * scale, token_level_rewards

    assert get_adv_estimator_fn("test_constant") is constant
    assert estimator_takes("test_constant") == {"token_level_rewards", "gamma"}
    assert call_adv_estimator("test_constant", everything(2, 2) | {"gamma": 0.5})[0].shape == (2, 2)


def test_wrong_names_and_signatures_are_reported() -> None:
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        get_adv_estimator_fn("grpp")
    with pytest.raises(ValueError, match="already registered"):
        register_adv_est("gae")(lambda *, values: (values, values))
    with pytest.raises(ValueError, match="must be a keyword argument"):
        register_adv_est("test_positional")(lambda values, /: (values, values))
    with pytest.raises(ValueError, match="requires 'prompts'"):
        register_adv_est("test_prompts")(lambda *, prompts: (prompts, prompts))
    with pytest.raises(ValueError, match="'gae' needs values"):
        call_adv_estimator("gae", {"token_level_rewards": FULL, "response_mask": FULL})
    for name in ("gae", "reinforce_plus_plus"):
        with pytest.raises(ValueError, match=r"be in \[0, 1\]"):
            call_adv_estimator(name, everything(2, 2) | {"gamma": 1.5})
