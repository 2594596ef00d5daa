"""The reward pool: graders in child processes that can be killed, each item under its own deadline.

A grader that hangs costs its timeout and, within a second, a fresh child; the other items of that child go to another
one. Timeouts, errors and zeros that a grader returned are counted separately. A thread of the owning process runs the
children's event loop; `score` and `submit` may be called from any number of threads.
"""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

from rlsys.rewards.pool.children import END_S, MAX_FAILED_STARTS, START_S, Children, remove_abandoned_folders
from rlsys.rewards.pool.messages import Grader, RewardItem, RewardResult, failed, reward_metrics
from rlsys.rewards.pool.worker import describe, grade_item, load_grader
from rlsys.utils.daemon_threads import LoopThread
from rlsys.utils.errors import ConfigError, result_within
from rlsys.utils.plugins import PACKAGE

__all__ = ["Grader", "RewardItem", "RewardPool", "RewardResult", "failed", "reward_metrics"]


class RewardPool(AbstractContextManager["RewardPool"]):
    """Grades by one `grader` in `num_workers` child processes that can be killed; `timeout_s` is for each item.

    Children start with the first items or by `start`. A grader file that cannot be loaded raises ConfigError there.
    With 0 workers the calling thread grades, without limits of time: there a debugger stops in the grader.
    """

    def __init__(self, grader: Grader | None = None, *, num_workers: int = 2, timeout_s: float = 10.0) -> None:
        self._grader = grader or Grader()
        if num_workers < 0:
            raise ConfigError(f"reward.num_workers={num_workers}: must not be negative")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"reward.timeout_s={timeout_s}: must be a positive number of seconds")
        path = self._grader.path
        if path is not None and not path.startswith(PACKAGE) and not Path(path).is_file():
            raise ConfigError(f"custom_reward_function.path={path}: local file not found")
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._lock = threading.Lock()
        self._running: tuple[LoopThread, Children] | None = None

    def start(self) -> None:
        """Start the children now and wait until one of them has loaded the grader."""
        if self._num_workers == 0:
            self._grade_here(())
            return
        result_within(self._graded([None]), MAX_FAILED_STARTS * (START_S + END_S), who="the reward pool", stage="start")

    def score(self, items: Sequence[RewardItem], *, deadline_s: float | None = None) -> list[RewardResult]:
        """Grade `items`; results are in their order. Raises DeadlineError when `deadline_s` passes first."""
        results = self.submit(items)
        hint = "raise trainer.deadlines.reward_s or lower reward.timeout_s"
        try:
            return result_within(results, deadline_s, who="the reward pool", stage="reward", hint=hint)
        finally:
            results.cancel()

    def submit(self, items: Sequence[RewardItem]) -> Future[list[RewardResult]]:
        """Grade `items` in the background; asyncio.wrap_future makes the future awaitable."""
        if items and self._num_workers:
            return self._graded(items)
        done: Future[list[RewardResult]] = Future()
        done.set_result(self._grade_here(items) if items else [])
        return done

    def close(self) -> None:
        """End all children; items still waiting become errors. Using the pool again restarts it."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            thread, children = running
            thread.close(children.close(), wait_s=5 * END_S)

    def _graded(self, items: Sequence[RewardItem | None]) -> Future[list[RewardResult]]:
        """Results of the children, whose event loop gets a thread first if it does not run."""
        with self._lock:
            if self._running is None:
                remove_abandoned_folders()
                children = Children(self._grader, num_workers=self._num_workers, timeout_s=self._timeout_s)
                self._running = LoopThread("reward-pool"), children
            thread, children = self._running
            return thread.start(children.grade(items))

    def _grade_here(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        grader = self._grader
        try:
            grade = load_grader(grader)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{grader} cannot be loaded: {describe(error.__cause__ or error)}") from error
        return [grade_item(grade, item.as_json()) for item in items]

    def __exit__(self, *_: object) -> None:
        self.close()
