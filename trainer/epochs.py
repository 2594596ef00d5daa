"""Batches of an asynchronous run that is repeated bit for bit: the version of every token is arithmetic, not a clock.

Between two pushes, an epoch, each open answer is continued up to a limit that follows from its prompt's place in the
data: with q = max_response_length / k, the answers of step s get their tokens (j - 1) q to j q from version
s - 2 - k + j. They are complete one epoch before their step, so generation and training overlap. At the end of the
epoch both meet, weights move, and the next epoch starts. What a step still misses then, at the start or after the
filter skipped prompts, is completed first. Requests go to the engines in fixed batches, longest answers first, so that
no result depends on speed, on the number of replicas or on one that is lost.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from rlsys.interfaces import State
from rlsys.protocol import DataProto
from rlsys.rollout.partial import PartialResponse
from rlsys.types import Finish, ModelResponse
from rlsys.utils.errors import result_within
from trainer.overlap import OverlapMeter
from trainer.prompt_groups import PromptGroup, PromptGroups
from trainer.source import Fleet


class EpochSource:
    """Continues all open answers by a fixed number of tokens between two pushes."""

    def __init__(
        self,
        groups: PromptGroups,
        fleet: Fleet,
        *,
        max_response_tokens: int,
        deadline_s: float,
        probe: Callable[[], None] | None = None,
    ) -> None:
        """`probe` is called once, after the first push; what it asks of the fleet is not counted."""
        self._groups, self._fleet, self._deadline_s = groups, fleet, deadline_s
        window = groups.window
        self._num_epochs = window.max_staleness - window.lookahead
        self._max_tokens, self._tokens_per_epoch = max_response_tokens, -(-max_response_tokens // self._num_epochs)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="epoch")
        self._running: Future[None] | None = None
        self._meter = OverlapMeter(fleet)
        self._probe = probe

    def next(self) -> DataProto:
        """The graded batch of the next step; the epoch beside its training starts."""
        per_step = self._groups.window.groups_per_step
        self.settle()
        with self._meter.waiting():
            self._groups.start()
            while (batch := self._groups.take()) is None:
                oldest = [group for group in self._groups.open[:per_step] if group.graded is None]
                self._await(self._pool.submit(self._advance, [(group, self._max_tokens) for group in oldest]))
                self._groups.start()
        epochs_left = [self._num_epochs - place // per_step for place in range(len(self._groups.open))]
        work = [(g, n * self._tokens_per_epoch) for g, n in zip(self._groups.open, epochs_left, strict=True)]
        self._running = self._pool.submit(self._advance, work)
        batch.meta_info["source_metrics"] |= self._meter.shares()
        return batch

    def published(self, version: int) -> None:
        """Engines serve this version from now on."""
        if self._probe is not None:
            self._probe()
            self._meter.new_counts()
            self._probe = None
        self._groups.window.version = version

    def settle(self) -> None:
        """Wait for the end of the epoch: weights only change between two."""
        running, self._running = self._running, None
        if running is not None:
            with self._meter.waiting():
                self._await(running)

    def save(self, folder: Path) -> dict[str, object]:
        """Keep finished groups and open answers beside a checkpoint."""
        self.settle()
        return self._groups.save(folder)

    def load(self, state: State, folder: Path) -> None:
        """Continue from a checkpoint."""
        self._groups.load(state, folder)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _await(self, running: Future[None]) -> None:
        result_within(running, self._deadline_s, who="the rollout fleet", stage="generate an epoch")

    def _advance(self, work: Sequence[tuple[PromptGroup, int]]) -> None:
        """Continue the groups' answers up to a number of tokens each, and grade the groups that are complete then."""
        short = [
            (group, row, min(limit, self._max_tokens))
            for group, limit in work
            for row, answer in enumerate(group.answers)
            if answer.finish is None and len(answer.tokens) < limit
        ]
        short.sort(key=lambda entry: -len(entry[0].answers[entry[1]].tokens))
        futures = self._fleet.submit([_up_to(g.answers[row], limit) for g, row, limit in short], together=True)
        for (group, row, limit), future in zip(short, futures, strict=True):
            group.answers[row] = _continued(group.answers[row], future.result(), limit)
        complete = [group for group, _ in work if group.graded is None and group.is_complete]
        if complete:
            self._groups.add(self._groups.grade(complete))
        for group in complete:
            self._groups.finish(group)
        self._groups.add(self._meter.new_counts())


def _up_to(answer: PartialResponse, max_tokens: int) -> PartialResponse:
    """A copy of the answer whose request ends at `max_tokens`, or at its own limit."""
    own = answer.request.gconfig
    params = replace(own, max_new_tokens=min(own.max_new_tokens, max_tokens))
    return PartialResponse.of(replace(answer.request, gconfig=params), answer.response())


def _continued(answer: PartialResponse, response: ModelResponse, limit: int) -> PartialResponse:
    """The answer after an epoch; it is unfinished if only the epoch's limit ended it."""
    after = PartialResponse.of(answer.request, response)
    is_cut = response.stop_reason is Finish.LENGTH and len(after.tokens) == limit and after.room > 0
    after.finish = None if is_cut else response.stop_reason
    return after
