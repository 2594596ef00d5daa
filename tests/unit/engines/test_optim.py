"""Learning-rate schedules against transformers' own, and settings that contradict each other."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from rlsys.config.schema.model import OptimConfig
from rlsys.engines.fsdp.optim import ShardedOptimizer
from rlsys.engines.optimizer import BaseOptimizer, lr_at, num_warmup_steps
from rlsys.utils.errors import ConfigError

THEIRS: dict[str, Callable[[Any, int, int], Any]] = {
    "constant": lambda optimizer, warmup, total: get_constant_schedule_with_warmup(optimizer, warmup),
    "linear": lambda optimizer, warmup, total: get_linear_schedule_with_warmup(optimizer, warmup, total),
    "cosine": lambda optimizer, warmup, total: get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, total, min_lr_rate=0.1
    ),
}


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers(schedule: Any, warmup: int) -> None:
    floor = 0.1 if schedule == "cosine" else 0.0
    ours = OptimConfig(lr=2.0, lr_scheduler_type=schedule, lr_warmup_steps=warmup, min_lr_ratio=floor)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = THEIRS[schedule](optimizer, warmup, 20)
    for step in range(25 if schedule != "cosine" else 20):
        assert lr_at(step, ours, 20) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_min_lr_ratio_is_where_the_decay_ends_and_stays() -> None:
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=0, min_lr_ratio=0.25)
    assert [lr_at(step, optim, 10) for step in (0, 5, 10, 99)] == [1.0, 0.625, 0.25, 0.25]
    shorter = optim.model_copy(update={"lr_decay_steps": 4})
    assert [lr_at(step, shorter, 10) for step in (0, 2, 4, 99)] == [1.0, 0.625, 0.25, 0.25]


def test_warmup_by_ratio_counts_of_the_total() -> None:
    optim = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.2)
    assert num_warmup_steps(optim, 20) == 4
    assert [lr_at(step, optim, 20) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_no_warmup_goes_before_the_ratio_and_a_warmup_may_take_all_steps() -> None:
    assert num_warmup_steps(OptimConfig(lr_warmup_steps=0, lr_warmup_steps_ratio=0.2), 20) == 0
    optim = OptimConfig(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=4, min_lr_ratio=0.25)
    assert [lr_at(step, optim, 4) for step in (3, 4, 5)] == [0.75, 1.0, 0.25]


@pytest.mark.parametrize(
    ("settings", "total_steps"),
    [({}, 0), ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.1}, 0), ({"lr_scheduler_type": "cosine"}, 1)],
)
def test_a_schedule_that_needs_no_total_or_has_it_is_taken(settings: dict[str, Any], total_steps: int) -> None:
    optimizer = ShardedOptimizer({}, OptimConfig(**settings), groups=[], total_steps=total_steps)
    assert optimizer.total_steps == total_steps


SCHEDULES = [{"lr_scheduler_type": "cosine"}, {"lr_scheduler_type": "linear"}, {"lr_warmup_steps_ratio": 0.1}]


@pytest.mark.parametrize("settings", SCHEDULES)
def test_a_schedule_that_needs_the_total_says_so(settings: dict[str, Any]) -> None:
    for total in ({}, {"total_steps": 0}):
        with pytest.raises(ConfigError, match="total number of training steps"):
            ShardedOptimizer({}, OptimConfig(**settings), groups=[], **total)


class Threads(BaseOptimizer):
    """Notes how many threads its updates have."""

    seen, fails = 0, False

    def _gradient_norm(self, count: float) -> float:
        return 1.0

    def _update(self, count: float, clip: float, lr: float) -> None:
        self.seen = torch.get_num_threads()
        if self.fails:
            raise MemoryError

    def zero_grad(self) -> None:
        pass

    def set_num_updates(self, count: int) -> None:
        self.num_steps = count


@pytest.mark.parametrize(("has_gpus", "given", "expected"), [(True, 1, 3), (False, 1, 1), (True, 2, 2)])
def test_a_step_has_the_cores_of_its_rank_where_the_rest_beside_a_gpu_has_one(
    monkeypatch: pytest.MonkeyPatch, has_gpus: bool, given: int, expected: int
) -> None:
    """Where OMP_NUM_THREADS asks for more, it has as many."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    threads = [given]  # not torch's own, since later tests fork this process
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    optimizer = Threads(OptimConfig(lr=1.0), grad_clip=1.0, total_steps=1)
    optimizer.step(1.0)
    assert (optimizer.seen, threads[-1]) == (expected, given)
    optimizer.fails = True
    with pytest.raises(MemoryError):
        optimizer.step(1.0)
    assert threads[-1] == given, "a step that fails gives them back too"
