"""The reward pool: graders in child processes that can be killed, each item under its own deadline.

A grader that hangs costs its timeout and, within a second, a fresh child; the other items of that child go to another
one. Timeouts, errors and zeros that a grader returned are counted separately. A thread of the owning process runs the
children (loop.py); `score` and `submit` may be called from any number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from rlsys.rewards.pool.loop import END_S, MAX_FAILED_STARTS, PendingBatch, PendingItem, PoolLoop
from rlsys.rewards.pool.messages import Grader, RewardItem, RewardResult, failed, reward_metrics
from rlsys.utils.errors import ConfigError, DeadlineError

__all__ = ["Grader", "RewardItem", "RewardPool", "RewardResult", "failed", "reward_metrics"]


class RewardPool:
    """Grades by one `grader` in `num_workers` child processes that can be killed; `timeout_s` is for each item.

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
            raise ConfigError(f"reward.num_workers={num_workers}: must be at least 1")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"reward.timeout_s={timeout_s}: must be a positive number of seconds")
        if self._grader.path is not None and not Path(self._grader.path).is_file():
            raise ConfigError(f"custom_reward_function.path={self._grader.path}: local file not found")
        self._num_workers, self._timeout_s, self._start_timeout_s = num_workers, timeout_s, start_timeout_s
        self._lock = threading.Lock()
        self._num_items = 0
        self._loop: PoolLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the children now and wait until one of them has loaded the grader."""
        started: Future[None] = Future()
        started.set_running_or_notify_cancel()
        self._add([started])
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
        """Grade `items` in the background; asyncio.wrap_future makes the future awaitable."""
        return self._submit(items).future

    def close(self) -> None:
        """End all children; items still waiting become errors. Using the pool again restarts it."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.stop()
            thread.join(timeout=5 * END_S)

    def _submit(self, items: Sequence[RewardItem]) -> PendingBatch:
        batch = PendingBatch(len(items))
        with self._lock:
            first = self._num_items
            self._num_items += len(items)
        if items:
            self._add([PendingItem(first + i, item, batch, i) for i, item in enumerate(items)])
        return batch

    def _add(self, work: Sequence[PendingItem | Future[None]]) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = PoolLoop(
                    self._grader,
                    num_workers=self._num_workers,
                    timeout_s=self._timeout_s,
                    start_timeout_s=self._start_timeout_s,
                )
                self._thread = threading.Thread(target=self._loop.run, name="reward-pool", daemon=True)
                self._thread.start()
            self._loop.add(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if loop := getattr(self, "_loop", None):
            loop.stop()
