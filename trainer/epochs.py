"""Batches of an asynchronous run that is repeated bit for bit: the version of every token is arithmetic, not a clock.

Between two pushes, an epoch, each open answer is continued up to a limit that follows from its prompt's place in the
data: with q = max_response_length / k, the answers of step s get their tokens (j - 1) q to j q from version
s - 2 - k + j. They are complete one epoch before their step, so generation and training overlap. At the end of the
epoch both meet, weights move, and the next epoch starts. What a step still misses then, at the start or after the
filter skipped prompts, is completed first. Requests go to the engines in fixed batches, longest answers first, so that
no result depends on speed, on the number of replicas or on one that is lost.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from math import inf
from pathlib import Path
from random import Random

from rlsys.fleet.fleet import RolloutFleet
from rlsys.interfaces import ExperienceSource, State
from rlsys.protocol import DataProto
from rlsys.types import ModelRequest, SamplingParams
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import ConfigError, result_within
from trainer.generation import REQUESTS
from trainer.overlap import OverlapMeter
from trainer.prompt_groups import OpenAnswers, PromptGroup

NUM_ROWS, NUM_TOKENS, MAX_PROMPT_TOKENS = 16, 8, 16


class EpochSource(ExperienceSource):
    """Continues all open answers by a fixed number of tokens between two pushes.

    Of episodes each turn is drawn as a whole, in the first epoch in which its episode has fewer tokens than the epoch's
    limit. The epoch ends when all episodes wait for a draw of the next one, however long their tools take. Its thread
    ends when the fleet is closed, or with the process.
    """

    def __init__(
        self, answers: OpenAnswers, *, max_tokens: int, deadline_s: float, probe: Callable[[], None] | None = None
    ) -> None:
        """Responses have at most `max_tokens`.

        `probe` is called once, after the first push.
        """
        self._answers, self._groups, self._deadline_s = answers, answers.groups, deadline_s
        window = self._groups.window
        self._num_epochs = window.max_staleness - window.lookahead
        self._max_tokens, self._tokens_per_epoch = max_tokens, -(-max_tokens // self._num_epochs)
        self._running: Future[None] | None = None
        self._meter = OverlapMeter(answers.fleet)
        self._probe = probe

    def next(self) -> DataProto:
        """The graded batch of the next step; the epoch beside its training starts."""
        per_step = self._groups.window.groups_per_step
        self.settle()
        with self._meter.waiting():
            self._groups.start()
            while (batch := self._groups.take()) is None:
                oldest = [group for group in self._groups.open[:per_step] if group.graded is None]
                self._await(in_daemon_thread(partial(self._advance, dict.fromkeys(oldest, inf)), name="epoch"))
                self._groups.start()
        limits = dict[PromptGroup, float]()
        for place, group in enumerate(self._groups.open):
            limit = (self._num_epochs - place // per_step) * self._tokens_per_epoch
            limits[group] = limit if limit < self._max_tokens else inf
        self._running = in_daemon_thread(partial(self._advance, limits), name="epoch")
        batch.meta_info["source_metrics"] |= self._meter.shares()
        return batch

    def published(self, version: int) -> None:
        """Engines serve this version from now on."""
        if self._probe is not None:
            self._probe()
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
        return self._answers.save(folder)

    def load(self, state: State, folder: Path) -> None:
        """Continue from a checkpoint."""
        self._answers.load(state, folder)

    def _await(self, running: Future[None]) -> None:
        who = "the episodes" if self._answers.by_episodes else "the rollout fleet"
        result_within(running, self._deadline_s, who=who, stage="generate an epoch", hint=self._answers.hint)

    def _advance(self, limits: Mapping[PromptGroup, float]) -> None:
        """Continue the groups' answers up to a number of tokens each, and grade the groups that are complete then."""
        before = self._meter.new_counts()  # of validation and probes too, whose answers are not those of a step
        self._groups.add({name: count for name, count in before.items() if name not in REQUESTS})
        complete = self._answers.advance(limits)
        self._answers.finish(complete, self._answers.grade(complete))
        self._groups.add(self._meter.new_counts())


def check_repeatable(fleet: RolloutFleet, vocab_size: int) -> None:
    """Complete one fixed batch twice on every replica; ConfigError unless tokens and log-probs are the same bits."""
    random = Random(0)
    rows = [
        ModelRequest(
            tuple(random.randrange(vocab_size) for _ in range(random.randint(1, MAX_PROMPT_TOKENS))),
            SamplingParams(NUM_TOKENS, ignore_eos=True, seed=row),
        )
        for row in range(min(NUM_ROWS, fleet.chunk_rows or 1))
    ]
    num_copies = 2 * int(fleet.metrics()["rollout/replicas_ready"])
    copies = [fleet.submit(rows, together=True) for _ in range(num_copies)]
    bits = [[(answer.output_tokens, answer.output_logprobs) for answer in map(Future.result, copy)] for copy in copies]
    if different := sum(copy != bits[0] for copy in bits):
        why = f"{different} of {num_copies} answers to the same batch have other bits, as several replicas complete it"
        how = "actor_rollout_ref.rollout.full_determinism=true on replicas of one kind of device"
        raise ConfigError(f"trainer.reproducible=true: {why}; set trainer.reproducible=false, or {how}")
