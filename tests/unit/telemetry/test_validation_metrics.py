"""Validation metrics: verl's bootstrap to the last bit against a plain loop, pass@k against counting."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.telemetry.validation_metrics import pass_at_k, validation_metrics


def bootstrap(data: list[Any], size: int, reduce: Callable[[list[Any]], float], seed: int) -> tuple[float, float]:
    """The definition, one draw at a time."""
    rng = np.random.RandomState(seed)
    picked = [reduce([data[i] for i in rng.choice(len(data), size=size, replace=True)]) for _ in range(1000)]
    return float(np.mean(picked)), float(np.std(picked))


def vote(drawn: list[tuple[str, float]]) -> float:
    count: dict[str, int] = {}
    for pred, _ in drawn:
        count[pred] = count.get(pred, 0) + 1
    winner = max(count, key=lambda pred: count[pred])
    return next(value for pred, value in drawn if pred == winner)


def test_one_response_a_prompt() -> None:
    metrics = validation_metrics(["gsm8k"] * 3, ["a", "b", "c"], {"reward": [1.0, 0.0, 0.5], "acc": [1, 0, 0]})
    assert metrics == pytest.approx(
        {
            "val-aux/gsm8k/reward/mean@1": 0.5,
            "val-core/gsm8k/acc/mean@1": 1 / 3,
        }
    )


@pytest.mark.parametrize("seed", [42, 7])
def test_bootstrap_equals_the_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    uids = [f"p{i // 5}" for i in range(10)]
    acc = rng.integers(0, 2, 10).astype(float).tolist()
    reward = rng.normal(size=10).tolist()
    pred = [str(p) for p in rng.integers(0, 3, 10)]
    metrics = validation_metrics(["ds"] * 10, uids, {"acc": acc, "reward": reward, "pred": pred}, seed=seed)
    for variable, column in (("acc", acc), ("reward", reward)):
        groups = [column[:5], column[5:]]
        preds = [pred[:5], pred[5:]]
        for n in (2, 4, 5):
            section = "val-core" if variable == "acc" and n == 5 else "val-aux"
            for name, reduce in (("best", max), ("worst", min)):
                want = np.mean([bootstrap(g, n, reduce, seed) for g in groups], axis=0)
                where = "val-aux" if name == "worst" else section
                assert metrics[f"{where}/ds/{variable}/{name}@{n}/mean"] == pytest.approx(want[0], rel=1e-12)
                assert metrics[f"{where}/ds/{variable}/{name}@{n}/std"] == pytest.approx(want[1], rel=1e-12)
            want = np.mean([bootstrap(list(zip(p, g)), n, vote, seed) for p, g in zip(preds, groups)], axis=0)
            assert metrics[f"{section}/ds/{variable}/maj@{n}/mean"] == pytest.approx(want[0], rel=1e-12)
            assert metrics[f"{section}/ds/{variable}/maj@{n}/std"] == pytest.approx(want[1], rel=1e-12)
    assert metrics["val-core/ds/acc/mean@5"] == pytest.approx(np.mean(acc))
    assert metrics["val-aux/ds/acc/std@5"] == pytest.approx((np.std(acc[:5]) + np.std(acc[5:])) / 2)


def test_core_variable_is_chosen_per_data_source() -> None:
    metrics = validation_metrics(
        ["math", "math", "code", "code"],
        [0, 1, 0, 1],
        {"reward": [1.0, 0.0, 1.0, 1.0], "acc": [True, False, None, None]},
    )
    assert metrics["val-core/math/acc/mean@1"] == 0.5
    assert metrics["val-aux/math/reward/mean@1"] == 0.5
    assert metrics["val-core/code/reward/mean@1"] == 1.0
    assert not [name for name in metrics if name.endswith("code/acc/mean@1")]


def test_an_accuracy_that_some_answers_of_a_source_lack_is_not_its_core_variable() -> None:
    metrics = validation_metrics(["math"] * 3, [0, 1, 2], {"reward": [1.0, 0.9, 0.9], "acc": [1.0, None, None]})
    assert metrics["val-core/math/reward/mean@1"] == pytest.approx(2.8 / 3)
    assert metrics["val-aux/math/acc/mean@1"] == 1.0, "of the graded answers"


def test_same_uid_in_two_data_sources_is_two_prompts() -> None:
    metrics = validation_metrics(["a", "b"], ["x", "x"], {"reward": [1.0, 0.0]})
    assert metrics["val-core/a/reward/mean@1"] == 1.0
    assert metrics["val-core/b/reward/mean@1"] == 0.0


def test_no_pred_no_majority() -> None:
    metrics = validation_metrics(["a"] * 4, [0] * 4, {"reward": [1.0, 0.0, 0.0, 1.0]})
    assert not [name for name in metrics if "maj@" in name]


def test_unhashable_predictions_can_vote() -> None:
    metrics = validation_metrics(["a"] * 4, [0] * 4, {"reward": [1, 1, 1, 0], "pred": [["x"], ["x"], ["x"], {"y": 1}]})
    assert 0.5 < metrics["val-core/a/reward/maj@4/mean"] <= 1.0


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="'acc' has 1 values for 2 rows"):
        validation_metrics(["a", "a"], [0, 1], {"acc": [1.0]})


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_subsets_with_a_correct_sample(case: tuple[int, int, int]) -> None:
    num, correct, k = case
    samples = [True] * correct + [False] * (num - correct)
    subsets = list(combinations(samples, k))
    assert pass_at_k(num, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_in_the_metrics() -> None:
    metrics = validation_metrics(["a"] * 4, [0] * 4, {"reward": [1.0, 0.1, 0.0, 0.0]})
    assert metrics["val-aux/a/reward/pass@1"] == pytest.approx(0.25)
    assert metrics["val-aux/a/reward/pass@2"] == pytest.approx(0.5)
    assert metrics["val-core/a/reward/pass@4"] == 1.0


@pytest.mark.parametrize(("num", "sizes"), [(8, {1, 2, 4, 8}), (9, {1, 2, 4, 8, 9})])
def test_subsets_double_up_to_all_and_only_the_core_variable_has_pass_at_k(num: int, sizes: set[int]) -> None:
    metrics = validation_metrics(["a"] * num, [0] * num, {"reward": [1.0] * num, "acc": [1.0] * num})
    names = [name.removeprefix("val-aux/").removeprefix("val-core/") for name in metrics]
    assert {name for name in names if "pass@" in name} == {f"a/acc/pass@{k}" for k in sizes}
    assert {name for name in names if "reward/best@" in name and name.endswith("mean")} == {
        f"a/reward/best@{k}/mean" for k in sizes - {1}
    }


@pytest.mark.parametrize(("num", "correct", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0)])
def test_pass_at_k_refuses_nonsense(num: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(num, correct, k)
