"""The advice on max_staleness against schedules worked out by hand."""

from dataclasses import astuple, replace

import pytest

from rlsys.planning.staleness_forecast import MeasuredRun, fitted_pace, forecast, proposed, staleness_advice

ONE = MeasuredRun([[10]], groups_per_step=1, num_replicas=1, max_num_seqs=64, decode_s=1.0, answer_s=0.0, train_s=1.0)


@pytest.mark.parametrize(
    ("max_staleness", "tokens_per_s", "age", "trainer_idle", "rollout_idle"),
    [(0, 0.5, 0.0, 0.5, 0.5), (1, 1.0, 1.0, 0.0, 0.0), (4, 1.0, 1.0, 0.0, 0.0)],
)
def test_one_answer_that_takes_as_long_to_draw_as_to_train(
    max_staleness: int, tokens_per_s: float, age: float, trainer_idle: float, rollout_idle: float
) -> None:
    expected = (max_staleness, tokens_per_s, age, trainer_idle, rollout_idle)
    assert astuple(forecast(ONE, max_staleness)) == pytest.approx(expected)


def test_the_trainer_waits_for_the_longest_answer_of_a_step() -> None:
    """30 s of drawing and 10 s of training a step; two steps overlap from 1 on, and 4 hide the longest answer."""
    run = replace(ONE, groups=[[10, 30]], train_s=0.25)
    speeds = [forecast(run, max_staleness).tokens_per_s for max_staleness in (0, 1, 4, 8)]
    assert speeds == pytest.approx([40 / 40, 40 / 20, 40 / 10, 40 / 10])
    idle = forecast(run, 0)
    assert (idle.trainer_idle, idle.rollout_idle) == pytest.approx((0.75, 0.25))


def test_a_decode_step_takes_longer_with_more_answers() -> None:
    run = replace(ONE, groups=[[10, 10]], answer_s=0.5, train_s=0.5)
    assert forecast(run, 0).tokens_per_s == pytest.approx(20 / (10 * 2.0 + 10))
    alone = replace(run, max_num_seqs=1)
    assert forecast(alone, 0).tokens_per_s == pytest.approx(20 / (2 * 10 * 1.5 + 10))


def test_the_smallest_within_two_percent_of_the_fastest_is_proposed() -> None:
    forecasts = [forecast(ONE, max_staleness) for max_staleness in (0, 1, 2)]
    assert proposed(forecasts).max_staleness == 1
    nearly = replace(forecasts[0], tokens_per_s=0.985)
    assert proposed([nearly, *forecasts[1:]]).max_staleness == 0
    assert "trainer.max_staleness=1; this run has 4" in staleness_advice(ONE, 4)


def test_a_large_run_is_simulated_by_a_share_of_it() -> None:
    large = replace(ONE, groups_per_step=8, num_replicas=8, train_s=1.0 / 8)
    lines = [staleness_advice(run, 0).splitlines()[2].split() for run in (ONE, large)]
    assert [float(speed) for _, speed, *_ in lines] == [1.0, 8.0]
    assert lines[0][2:] == lines[1][2:]


def test_the_pace_is_fitted_to_loads_of_different_size() -> None:
    seconds = [10 * (1.0 + 0.1 * 4), 20 * (1.0 + 0.1 * 32)]
    assert fitted_pace([(seconds[0], 10, 40), (seconds[1], 20, 640)]) == pytest.approx((1.0, 0.1))
    assert fitted_pace([(5.0, 10, 20)]) == pytest.approx((0.5, 0.0))
    assert fitted_pace([(30.0, 10, 10), (30.0, 20, 100)]) == pytest.approx((2.0, 0.0)), "never negative"
