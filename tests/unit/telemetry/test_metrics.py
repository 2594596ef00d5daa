"""Batch metrics against numbers worked out by hand, and the stage clock."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rlsys.telemetry.metrics import StageTimer, data_metrics, reduce_metrics, throughput_metrics, timing_metrics
from tests.timing import scaled_s


def small_batch() -> dict[str, torch.Tensor]:
    """Three rows, prompts of width 2, responses of width 3; the last row is aborted."""
    return {
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0], [9.0, 9.0, 9.0]]),
        "token_level_rewards": torch.tensor([[-0.25, 0.0, 1.0], [0.0, 0.25, 0.0], [9.0, 9.0, 9.0]]),
        "advantages": torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 99.0], [99.0, 99.0, 99.0]]),
        "returns": torch.tensor([[1.0, 1.0, 1.0], [3.0, 4.0, 99.0], [99.0, 99.0, 99.0]]),
        "values": torch.tensor([[1.0, 1.0, 2.0], [3.0, 3.0, 99.0], [99.0, 99.0, 99.0]]),
    }


def test_data_metrics_by_hand() -> None:
    metrics = data_metrics(small_batch())
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.75,
            "critic/score/max": 1.0,
            "critic/score/min": 0.5,
            "critic/rewards/mean": 0.5,
            "critic/rewards/max": 0.75,
            "critic/rewards/min": 0.25,
            "critic/advantages/mean": 1.0,
            "critic/advantages/max": 3.0,
            "critic/advantages/min": -1.0,
            "critic/returns/mean": 2.0,
            "critic/returns/max": 4.0,
            "critic/returns/min": 1.0,
            "critic/values/mean": 2.0,
            "critic/values/max": 3.0,
            "critic/values/min": 1.0,
            # returns - values = 0, 0, -1, 0, 1: variance 0.5; returns 1, 1, 1, 3, 4: variance 2
            "critic/vf_explained_var": 1 - 0.5 / (2.0 + 1e-5),
            "response_length/mean": 5 / 3,
            "response_length/max": 3.0,
            "response_length/min": 0.0,
            "response_length/clip_ratio": 1 / 3,
            "response_length_non_aborted/mean": 2.5,
            "response_length_non_aborted/max": 3.0,
            "response_length_non_aborted/min": 2.0,
            "response_length_non_aborted/clip_ratio": 0.5,
            "response/aborted_ratio": 1 / 3,
            "prompt_length/mean": 4 / 3,
            "prompt_length/max": 2.0,
            "prompt_length/min": 1.0,
            "prompt_length/clip_ratio": 1 / 3,
        }
    )


def test_a_response_of_one_token_counts_whatever_the_number_of_rows() -> None:
    batch = {name: rows[:2] for name, rows in small_batch().items()}
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
    metrics = data_metrics(batch)
    assert (metrics["response/aborted_ratio"], metrics["critic/score/min"]) == (0.0, 0.5)
    assert (metrics["response_length/mean"], metrics["response_length/clip_ratio"]) == (2.0, 0.5)
    assert (metrics["prompt_length/mean"], metrics["prompt_length/clip_ratio"]) == (1.5, 0.5)


def test_two_tokens_have_an_explained_variance() -> None:
    batch = {name: rows[1:2] for name, rows in small_batch().items()}
    assert data_metrics(batch)["critic/vf_explained_var"] == pytest.approx(1 - 0.5 / (0.5 + 1e-5))


def test_without_critic_there_are_no_value_metrics() -> None:
    batch = small_batch()
    del batch["values"]
    names = data_metrics(batch)
    assert not [name for name in names if "values" in name or "vf_" in name]


def test_a_batch_of_aborted_rows_gives_nan_not_an_exception() -> None:
    batch = {name: t[2:] for name, t in small_batch().items()}
    metrics = data_metrics(batch)
    assert metrics["response/aborted_ratio"] == 1.0
    assert math.isnan(metrics["critic/score/mean"])
    assert math.isnan(metrics["critic/vf_explained_var"])


def test_an_episode_in_which_nothing_was_drawn_counts_as_aborted() -> None:
    batch = small_batch() | {"turn_ids": torch.tensor([[0, -1, 1], [-1, -1, -1], [-1, -1, -1]])}
    metrics = data_metrics(batch)
    assert metrics["response/aborted_ratio"] == pytest.approx(2 / 3)
    assert metrics["critic/score/min"] == 1.0
    batch["turn_ids"][1, 0] = 0
    assert data_metrics(batch)["response/aborted_ratio"] == pytest.approx(1 / 3)


def test_timing_divides_generation_by_response_tokens_and_training_by_all() -> None:
    metrics = timing_metrics(
        {"gen": 2.0, "update_actor": 3.0, "reward": 1.0}, num_prompt_tokens=100, num_response_tokens=500
    )
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 3.0,
            "timing_s/reward": 1.0,
            "timing_per_token_ms/gen": 4.0,
            "timing_per_token_ms/update_actor": 5.0,
        }
    )


def test_throughput_is_per_device() -> None:
    metrics = throughput_metrics(num_tokens=1000, step_s=2.0, num_devices=4)
    assert metrics == {"perf/total_num_tokens": 1000.0, "perf/time_per_step": 2.0, "perf/throughput": 125.0}
    assert throughput_metrics(num_tokens=1000, step_s=2.0, num_devices=0)["perf/throughput"] == 500.0
    assert throughput_metrics(num_tokens=8, step_s=0.0, num_devices=4) == {"perf/total_num_tokens": 8.0}


def test_reduce_takes_mean_max_or_min_by_the_last_part_of_the_name() -> None:
    reduced = reduce_metrics(
        {
            "actor/loss": [1.0, 2.0, 6.0],
            "critic/score/max": [1.0, 5.0, 2.0],
            "actor/min_ratio": [0.5, 0.25],
            "actor/lr": 1e-6,
            "val/maximum/acc": [0.0, 1.0],
            "tensor": torch.tensor([1.0, 3.0]),
            "scalar": torch.tensor(2.5),
            "empty": [],
        }
    )
    assert math.isnan(reduced.pop("empty"))
    assert reduced == pytest.approx(
        {
            "actor/loss": 3.0,
            "critic/score/max": 5.0,
            "actor/min_ratio": 0.25,
            "actor/lr": 1e-6,
            "val/maximum/acc": 0.5,
            "tensor": 2.0,
            "scalar": 2.5,
        }
    )


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
@pytest.mark.parametrize("name", ["a/mean", "a/max", "a/min"])
def test_reduce_never_hides_nan(name: str, values: list[float]) -> None:
    assert math.isnan(reduce_metrics({name: values})[name])


def test_reduce_survives_infinities() -> None:
    assert reduce_metrics({"a": [math.inf, 1.0]})["a"] == math.inf
    assert math.isnan(reduce_metrics({"a": [math.inf, -math.inf, 1.0]})["a"])
    assert reduce_metrics({"a": [1e17, 1.0, -1e17, 1.0]})["a"] == 0.5


def test_stage_timer_adds_up_and_times_a_failing_stage() -> None:
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 25.0])
    timer = StageTimer(clock=lambda: next(ticks))
    with timer("gen"):
        pass
    with timer("gen"):
        pass
    with pytest.raises(ValueError, match="boom"), timer("reward"):
        raise ValueError("boom")
    assert timer.drain() == {"gen": 3.0, "reward": 5.0}
    assert timer.drain() == {}


def test_stage_timer_surrounds_the_stage_with_its_listeners() -> None:
    events: list[str] = []

    @contextmanager
    def listener(stage: str) -> Iterator[None]:
        events.append(f"enter {stage}")
        yield
        events.append(f"leave {stage}")

    with StageTimer(listener, listener)("adv"):
        events.append("work")
    assert events == ["enter adv", "enter adv", "work", "leave adv", "leave adv"]


class HeldSeconds(dict[str, float]):
    """What is read from it is used only after it was drained, or after a while."""

    def __init__(self, **seconds: float) -> None:
        super().__init__(seconds)
        self.is_read, self.is_drained = threading.Event(), threading.Event()

    def get(self, stage: str, default: float = 0.0) -> float:  # type: ignore[override]
        seconds = super().get(stage, default)
        self.is_read.set()
        self.is_drained.wait(0.2)
        return seconds


def test_seconds_of_a_stage_that_ends_while_they_are_drained_are_counted_once() -> None:
    ticks = iter([0.0, 1.0])
    timer, seconds = StageTimer(clock=lambda: next(ticks)), HeldSeconds(reward=5.0)
    timer.seconds = seconds

    def grade() -> None:
        with timer("reward"):
            pass

    thread = threading.Thread(target=grade)
    thread.start()
    assert seconds.is_read.wait(scaled_s(10))
    first = timer.drain()
    seconds.is_drained.set()
    thread.join()
    assert first.get("reward", 0.0) + timer.drain().get("reward", 0.0) == 6.0
