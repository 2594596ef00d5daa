"""Samplers that learn from the batches of a run."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast
from unittest.mock import MagicMock

from rlsys.data.rl_sampler import AbstractCurriculumSampler, SamplerCursor
from rlsys.protocol import DataProto
from tests.timing import scaled_s
from tests.unit.trainer.test_steps import config, rows
from trainer.ppo import RayPPOTrainer


class Curriculum(AbstractCurriculumSampler):
    """Its draw waits for `go`; it notes whether it was drawn from when it learned."""

    def __init__(self) -> None:
        self.is_drawing, self.go = threading.Event(), threading.Event()
        self.learned_while_drawing: list[bool] = []

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.is_drawing.set()
        self.go.wait(scaled_s(10))
        self.is_drawing.clear()
        return iter(range(8))

    def update(self, batch: DataProto) -> None:
        self.learned_while_drawing.append(self.is_drawing.is_set())


class Trainer(RayPPOTrainer):
    """Trains on nothing and pushes nothing."""

    parts = cast(Any, MagicMock(advisor=None))

    def push_weights(self, *, meanwhile: Callable[[], object] = lambda: None) -> Any:
        meanwhile()


def test_a_sampler_does_not_learn_while_it_is_drawn_from() -> None:
    sampler = Curriculum()
    cursor = SamplerCursor(sampler, 8, batch_size=8, shuffle=True)
    dataset, nothing = MagicMock(), cast(Any, None)
    dataset.__len__.return_value = 8
    trainer = Trainer(config(), nothing, {}, nothing, nothing, train_dataset=dataset, train_sampler=sampler)
    trainer.reporter = MagicMock()
    trainer.parts.steps.advantages.return_value = rows()
    with ThreadPoolExecutor() as threads:
        drawn = threads.submit(cursor.next)
        assert sampler.is_drawing.wait(scaled_s(10))
        step = threads.submit(trainer.step, rows())
        wait([step], 0.3)
        sampler.go.set()
        step.result(scaled_s(10))
        assert drawn.result(scaled_s(10)).rows == tuple(range(8))
    assert sampler.learned_while_drawing == [False]


def test_the_advice_on_staleness_counts_the_push() -> None:
    cfg, dataset, nothing = config(), MagicMock(), cast(Any, None)
    cfg = cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update={"backend": "ray"})})
    dataset.__len__.return_value = 8
    trainer = RayPPOTrainer(cfg, nothing, {}, nothing, nothing, train_dataset=dataset)
    trainer.reporter = trainer.stage = MagicMock()
    trainer.reporter.best_effort = lambda name, do: do()
    trainer._parts = parts = cast(Any, MagicMock())
    parts.steps.advantages.return_value, trainer.total_steps = rows(), 1
    report = MagicMock(stage_s={}, network_bytes={}, seconds=0, num_bytes=0)
    parts.weights.push = lambda version: time.sleep(0.2) or report
    trainer.step(rows())
    assert parts.advisor.add.call_args.args[1] >= 0.2
