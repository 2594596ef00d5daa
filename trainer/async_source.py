"""Batches of a free-running asynchronous run: generation continues while the trainer updates and weights are pushed.

Requests start as soon as the window allows; the fleet carries them over weight pushes and lost replicas. A thread
grades groups as they finish.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlsys.interfaces import State
from rlsys.protocol import DataProto
from rlsys.rollout.partial import PartialResponse
from rlsys.types import ModelRequest, ModelResponse
from rlsys.utils.errors import DeadlineError
from trainer.overlap import OverlapMeter
from trainer.prompt_groups import PromptGroup, PromptGroups
from trainer.source import Fleet

AnswerFutures = dict[int, Future[Any]]
"""By row of a group, but for answers that are complete: futures of responses, or of episodes."""


class AsyncSource:
    """Keeps the fleet busy with as many prompts as `max_staleness` allows, and takes them in the order of the data."""

    def __init__(self, groups: PromptGroups, fleet: Fleet, *, deadline_s: float) -> None:
        self._groups, self._fleet, self._deadline_s = groups, fleet, deadline_s
        self._running: dict[PromptGroup, AnswerFutures] = {}
        self._ended: SimpleQueue[PromptGroup | None] = SimpleQueue()
        self._change = threading.Condition()
        self._failure: BaseException | None = None
        self._last_progress_s = time.monotonic()
        self._meter = OverlapMeter(fleet)
        self._thread = threading.Thread(target=self._grade_ended, name="grade", daemon=True)
        self._thread.start()

    def next(self) -> DataProto:
        """The graded batch of the next step."""
        with self._change, self._meter.waiting():
            self._groups.add(self._meter.new_counts())
            while (batch := self._taken()) is None:
                left_s = self._last_progress_s + self._deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError(self._unfinished(), "generate and grade", self._deadline_s)
                self._change.wait(left_s)
        batch.meta_info["source_metrics"] |= self._meter.shares()
        return batch

    def published(self, version: int) -> None:
        """Engines serve this version from now on, so more prompts may start."""
        with self._change:
            self._groups.window.version = version
            self._start()

    def settle(self) -> None:
        """Weights may change at any time: the fleet keeps what is in progress."""

    def save(self, folder: Path) -> dict[str, object]:
        """Keep finished groups and the tokens drawn so far beside a checkpoint."""
        drafts = {draft.request.rid: draft for draft in self._fleet.unfinished()}
        with self._change:
            for group, futures in self._running.items():
                for row, future in futures.items():
                    draft = drafts.get(group.answers[row].request.rid)
                    if group.answers[row].finish is not None:
                        continue
                    if future.done() and future.exception() is None:
                        group.answers[row] = _complete(group.answers[row].request, future.result())
                    elif draft is not None:
                        group.answers[row] = draft
            return self._groups.save(folder)

    def load(self, state: State, folder: Path) -> None:
        """Continue from a checkpoint; generation starts with the first push."""
        self._groups.load(state, folder)

    def close(self) -> None:
        self._ended.put(None)
        with self._change:
            futures = [future for some in self._running.values() for future in some.values()]
            self._running.clear()
        for future in futures:
            future.cancel()

    def _taken(self) -> DataProto | None:
        if self._failure is not None:
            raise self._failure
        return self._groups.take()

    def _start(self) -> None:
        """Submit all open groups that are not with the fleet; the caller holds the lock."""
        self._groups.start()
        new = [group for group in self._groups.open if group.graded is None and group not in self._running]
        for group, futures in zip(new, self._submitted(new), strict=True):
            self._running[group] = futures
            self._ended.put(group)
            for future in futures.values():
                future.add_done_callback(lambda _, group=group: self._ended.put(group))

    def _submitted(self, groups: Sequence[PromptGroup]) -> list[AnswerFutures]:
        """Hand groups to the fleet: a future for each answer by its row, none for one that a checkpoint has."""
        missing = [answer for group in groups for answer in group.answers if answer.finish is None]
        futures = iter(self._fleet.submit(missing))
        unfinished = ([row for row, answer in enumerate(group.answers) if answer.finish is None] for group in groups)
        return [{row: next(futures) for row in rows} for rows in unfinished]

    def _grade_ended(self) -> None:
        while (group := self._ended.get()) is not None:
            groups = [group]
            while not self._ended.empty():
                if (another := self._ended.get()) is None:
                    return
                groups.append(another)
            with self._change:
                groups = [group for group in dict.fromkeys(groups) if _all_done(self._running.get(group))]
            if not groups:
                continue
            try:
                self._settle(groups)
                with self._change:
                    self._last_progress_s = time.monotonic()
                    self._start()
                    self._change.notify_all()
            except BaseException as error:
                with self._change:
                    self._failure = error
                    self._change.notify_all()

    def _settle(self, groups: Sequence[PromptGroup]) -> None:
        """Grade the groups that are complete and skip those that failed; their places are filled."""
        errors: dict[PromptGroup, BaseException] = {}
        with self._change:
            for group in groups:
                for row, future in self._running.get(group, {}).items():
                    if future.cancelled():
                        continue
                    if (error := future.exception()) is not None:
                        errors[group] = error
                    else:
                        group.answers[row] = _complete(group.answers[row].request, future.result())
        complete = [group for group in groups if group.is_complete and group not in errors]
        metrics = self._groups.grade(complete) if complete else {}
        with self._change:
            self._groups.add(metrics)
            for group in groups:
                self._running.pop(group, None)
            for group in complete:
                self._groups.finish(group)
            for group, error in errors.items():
                if not isinstance(error, Exception):
                    raise error
                self._groups.fail(group, error)

    def _unfinished(self) -> str:
        groups = [group.number for group in self._groups.open if group.graded is None]
        first = f"prompt {groups[0]} of {len(groups)} unfinished ones" if groups else "no unfinished prompt"
        return f"the rollout fleet ({first}; step {self._groups.window.step} waits)"


def _all_done(futures: AnswerFutures | None) -> bool:
    return futures is not None and all(future.done() for future in futures.values())


def _complete(request: ModelRequest, response: ModelResponse) -> PartialResponse:
    partial = PartialResponse.of(request, response)
    partial.finish = response.stop_reason
    return partial
