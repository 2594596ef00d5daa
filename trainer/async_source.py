"""Batches of a free-running asynchronous run: generation continues while the trainer updates and weights are pushed.

Requests start as soon as the window allows, as far ahead as is needed for the trainer not to wait; the fleet carries
them over weight pushes and lost replicas. A thread grades groups as they finish.
"""

import threading
import time
from pathlib import Path
from queue import SimpleQueue

from rlsys.fleet.fleet import POLL_S
from rlsys.interfaces import ExperienceSource, State
from rlsys.protocol import DataProto
from rlsys.utils.errors import DeadlineError
from trainer.overlap import OverlapMeter
from trainer.prompt_groups import OpenAnswers, PromptGroup


class AsyncSource(ExperienceSource):
    """Generates so far ahead that the trainer does not wait, within `max_staleness`; takes prompts in their order.

    Weights may change at any time: the fleet keeps what is in progress.
    """

    def __init__(self, answers: OpenAnswers, *, deadline_s: float) -> None:
        self._answers, self._groups, self._deadline_s = answers, answers.groups, deadline_s
        self._window, self._is_first = self._groups.window, True
        self._window.lead = 1.0
        self._ended: SimpleQueue[PromptGroup | None] = SimpleQueue()
        self._change = threading.Condition()
        self._failure: BaseException | None = None
        self._last_progress_s = time.monotonic()
        self._meter = OverlapMeter(answers.fleet)
        self._thread = threading.Thread(target=self._grade_ended, name="grade", daemon=True)
        self._thread.start()

    def next(self) -> DataProto:
        """The graded batch of the next step."""
        with self._change:
            self._groups.add(self._meter.new_counts())
        while (batch := self._next()) is None:
            self._answers.fleet.push_if_stranded()
        return batch

    def published(self, version: int) -> None:
        """Engines serve this version from now on, so more prompts may start."""
        with self._change:
            self._window.version, self._last_progress_s = version, time.monotonic()
            self._start()

    def save(self, folder: Path) -> dict[str, object]:
        """Keep finished groups and what was drawn so far beside a checkpoint."""
        with self._change:
            return {**self._answers.save(folder), "lead": self._window.lead}

    def load(self, state: State, folder: Path) -> None:
        """Continue from a checkpoint; generation starts with the first push."""
        self._answers.load(state, folder)
        self._window.lead = state.get("lead", 1.0)

    def close(self) -> None:
        self._ended.put(None)
        with self._change:
            futures = [future for some in self._answers.running.values() for future in some.values()]
            self._answers.running.clear()
        for future in futures:
            future.cancel()

    def _next(self) -> DataProto | None:
        """The batch, or None if it is still incomplete after POLL_S."""
        with self._change:
            if self._failure is not None:
                raise self._failure
            if (batch := self._groups.take()) is None:
                left_s = self._last_progress_s + self._deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(self._unfinished(), "generate and grade", self._deadline_s, self._answers.hint)
                with self._meter.waiting():
                    self._change.wait(min(left_s, POLL_S))
                return None
            shares, lead = self._meter.shares(), min(self._window.lead, self._window.most_ahead)
            if not self._is_first:
                idle = shares["perf/trainer_idle"]
                self._window.adapt_lead(idle / max(1.0 - idle, 1e-9))
            self._is_first = False
            self._start()
        batch.meta_info["source_metrics"] |= {**shares, "rollout/lead": float(lead)}
        return batch

    def _start(self) -> None:
        """Start the answers of all open groups that are not on their way; the caller holds the lock."""
        self._groups.start()
        running = self._answers.running
        new = [group for group in self._groups.open if group.graded is None and group not in running]
        self._answers.submit(new)
        for group in new:
            self._ended.put(group)
            for future in running[group].values():
                future.add_done_callback(lambda _, group=group: self._ended.put(group))

    def _grade_ended(self) -> None:
        while (group := self._ended.get()) is not None:
            groups = [group]
            while not self._ended.empty():
                if (another := self._ended.get()) is None:
                    return
                groups.append(another)
            with self._change:
                groups = [group for group in dict.fromkeys(groups) if self._answers.has_ended(group)]
            if not groups:
                continue
            try:
                metrics = self._answers.grade(groups)
                with self._change:
                    if not self._answers.running:
                        return  # closed meanwhile
                    self._answers.finish(groups, metrics)
                    self._last_progress_s = time.monotonic()
                    self._start()
                    self._change.notify_all()
            except BaseException as error:
                with self._change:
                    self._failure = error
                    self._change.notify_all()

    def _unfinished(self) -> str:
        groups = [group.number for group in self._groups.open if group.graded is None]
        first = f"prompt {groups[0]} of {len(groups)} unfinished ones" if groups else "no unfinished prompt"
        return f"the rollout fleet ({first}; step {self._window.step} waits)"
