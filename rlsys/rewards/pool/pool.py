"""The reward pool: graders in child processes that can be killed, each item under its own deadline.

A grader that hangs costs its timeout and, within a second, a fresh child; what else had been given to that child is
given to another. Timeouts, errors and honest zeros are counted apart. A thread of the owning process pumps the
children (pump.py); `score` and `submit` may be called from any number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from rlsys.rewards.pool.loop import END_S, MAX_FAILED_STARTS, Batch, Job, Pump
from rlsys.rewards.pool.records import Grader, RewardItem, RewardResult, failed, reward_metrics
from rlsys.utils.errors import ConfigError, DeadlineError

__all__ = ["Grader", "RewardItem", "RewardPool", "RewardResult", "failed", "reward_metrics"]


class RewardPool:
    """`num_workers` killable children that grade by one `grader`; `timeout_s` is for each item.

    Children start with the first items or by `start`. A grader file that cannot be loaded raises ConfigError there.
    """

    def __init__(
        self,
        grader: Grader | None = None,
        *,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._grader = grader or Grader()
        if num_workers < 1:
            raise ConfigError(f"reward.num_workers={num_workers}: at least 1 is needed")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"reward.timeout_s={timeout_s}: a positive number of seconds is needed")
        if self._grader.path is not None and not Path(self._grader.path).is_file():
            raise ConfigError(f"custom_reward_function.path={self._grader.path}: there is no such local file")
        self._num_workers, self._timeout_s, self._start_timeout_s = num_workers, timeout_s, start_timeout_s
        self._lock = threading.Lock()
        self._num_jobs = 0
        self._pump: Pump | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the children now and wait until one of them has loaded the grader."""
        started: Future[None] = Future()
        started.set_running_or_notify_cancel()
        self._hand_in([started])
        deadline_s = MAX_FAILED_STARTS * (self._start_timeout_s + END_S)
        try:
            started.result(timeout=deadline_s)
        except TimeoutError as error:
            raise DeadlineError("the reward pool", "start", deadline_s) from error

    def score(self, items: Sequence[RewardItem], *, deadline_s: float | None = None) -> list[RewardResult]:
        """Grade `items`; results are in their order. Raises DeadlineError when `deadline_s` passes first."""
        batch = self._submit(items)
        try:
            return batch.future.result(timeout=deadline_s)
        except TimeoutError as error:
            batch.abandoned = True
            hint = "raise trainer.deadlines.reward_s or lower reward.timeout_s"
            raise DeadlineError("the reward pool", "reward", deadline_s or 0.0, hint) from error

    def submit(self, items: Sequence[RewardItem]) -> Future[list[RewardResult]]:
        """Hand in `items`; the future gives their results in order (asyncio.wrap_future makes it awaitable)."""
        return self._submit(items).future

    def close(self) -> None:
        """End all children; items still waiting are answered as errors. Using the pool again starts it anew."""
        with self._lock:
            pump, thread, self._pump, self._thread = self._pump, self._thread, None, None
        if pump is not None and thread is not None:
            pump.stop()
            thread.join(timeout=5 * END_S)

    def _submit(self, items: Sequence[RewardItem]) -> Batch:
        batch = Batch(len(items))
        with self._lock:
            first = self._num_jobs
            self._num_jobs += len(items)
        if items:
            self._hand_in([Job(first + i, item, batch, i) for i, item in enumerate(items)])
        return batch

    def _hand_in(self, work: Sequence[Job | Future[None]]) -> None:
        with self._lock:
            if self._pump is None:
                self._pump = Pump(
                    self._grader,
                    num_workers=self._num_workers,
                    timeout_s=self._timeout_s,
                    start_timeout_s=self._start_timeout_s,
                )
                self._thread = threading.Thread(target=self._pump.run, name="reward-pool", daemon=True)
                self._thread.start()
            self._pump.hand_in(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if pump := getattr(self, "_pump", None):
            pump.stop()
