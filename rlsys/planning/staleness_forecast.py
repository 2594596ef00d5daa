"""What a run would gain by another `trainer.max_staleness`, from the answers and the speeds of its own first steps.

The schedule is simulated: step s trains on the next prompts in their order, and a prompt may start once the version
s - 1 - max_staleness is served, but no earlier than is needed for the trainer not to wait. Lengths are drawn from the
measured groups.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from random import Random

import numpy as np

CHOICES = (0, 1, 2, 4, 8)
NEAR_BEST, NUM_STEPS, MAX_REPLICAS = 0.98, 16, 4
"""Share of the best speed that is near it; steps and, at most, replicas that are simulated."""
WAITING_SHARE = 0.01
"""Share of its time that the trainer may wait so that tokens are younger."""
MANY_STEPS, FAST_FALL = 16, 0.1
"""After so many steps in a row that were complete early, prompts start so many steps later at each further one."""


@dataclass(frozen=True)
class MeasuredRun:
    """Answer lengths by group, the rollout's size, and speeds: `decode_s` of a decode step, `answer_s` more for each
    running answer, `train_s` of training on a token, with the push."""

    groups: Sequence[Sequence[int]]
    groups_per_step: int
    num_replicas: int
    max_num_seqs: int
    decode_s: float
    answer_s: float
    train_s: float


@dataclass(frozen=True)
class Forecast:
    """A steady run: the mean age of a token in versions, and the idle shares of trainer and rollout."""

    max_staleness: int
    tokens_per_s: float
    age: float
    trainer_idle: float
    rollout_idle: float


_Waiting = tuple[int, int]
"""An answer that has not started: the number of its group, and its length."""
_Started = tuple[int, int, int]
"""The same of an answer that has started, and the version that was served at its start."""


class _Replica:
    """Answers that advance together, a token in each decode step; the more run, the longer a step takes.

    `clock` counts decode steps. `running` is a heap of (clock at its end, answer).
    """

    def __init__(self, run: MeasuredRun) -> None:
        self._run = run
        self.clock = self.now_s = self.idle_s = 0.0
        self.running: list[tuple[float, _Started]] = []

    @property
    def _decode_s(self) -> float:
        return self._run.decode_s + self._run.answer_s * len(self.running)

    def next_s(self) -> float:
        """When the next answer ends."""
        return self.now_s + (self.running[0][0] - self.clock) * self._decode_s if self.running else inf

    def advance(self, now_s: float) -> Iterator[_Started]:
        """The answers that have ended by then."""
        if self.running:
            self.clock += (now_s - self.now_s) / self._decode_s
        else:
            self.idle_s += now_s - self.now_s
        self.now_s = now_s
        while self.running and self.running[0][0] <= self.clock + 1e-6:
            yield heappop(self.running)[1]


@dataclass
class _Group:
    """A prompt's answers: how many have not ended, their tokens, and the sum over tokens of their versions."""

    unfinished: int
    tokens: int
    versions: float = 0.0


def next_lead(leads: Sequence[float], waited_steps: float, *, most: float, num_early: int = 0) -> float:
    """The lead, how many steps ahead of the trainer prompts start (1 or more), after `leads` in the steps until now.

    `waited_steps` is how long the trainer has waited for the last step, in units of what training on a step takes: the
    lead rises to the one with which that step's prompts started and this more. It falls by WAITING_SHARE every step, so
    it settles where the trainer waits for that share of its time; by FAST_FALL once MANY_STEPS steps in a row
    (`num_early`) were each complete before the step ahead of them was trained on. It rises to `most` + 1, which counts
    as `most`, so that a trainer that waits with the full window does not give it up at the first step without a wait.
    """
    lead = leads[-1]
    lead_at_start = next((one for steps, one in enumerate(reversed(leads)) if steps >= one), leads[0])
    fall = WAITING_SHARE if num_early < MANY_STEPS else FAST_FALL
    return max(1.0, min(most + 1.0, max(lead, min(lead, lead_at_start) + waited_steps) - fall))


def forecast(run: MeasuredRun, max_staleness: int) -> Forecast:
    """The measured run with this `max_staleness`, after the steps in which its window fills and the lead settles."""
    random, per_step, num_unsteady = Random(0), run.groups_per_step, 3 * max_staleness + 1
    replicas, groups, waiting = [_Replica(run) for _ in range(run.num_replicas)], list[_Group](), deque[_Waiting]()
    now_s, train_s, train_end_s, version, leads = 0.0, 0.0, inf, 0, [1.0]
    # `trained`: all tokens, the sum of their ages, the seconds of their training; `ends` of each step: the time, these
    # three, and the idle seconds of a replica
    trained, ends = np.zeros(3), list[np.ndarray]()
    while version <= num_unsteady + NUM_STEPS:
        while len(groups) < (version + 1) * per_step + int(min(leads[-1], max_staleness) * per_step):
            lengths = random.choice(run.groups)
            waiting.extend((len(groups), length) for length in lengths)
            groups.append(_Group(len(lengths), sum(lengths)))
        _start_answers(waiting, replicas, run.max_num_seqs, version)
        step = groups[version * per_step : (version + 1) * per_step]
        if train_end_s == inf and not any(group.unfinished for group in step):
            if ends:
                leads.append(next_lead(leads, (now_s - ends[-1][0]) / train_s, most=max_staleness))
            tokens = sum(group.tokens for group in step)
            train_s, age = tokens * run.train_s, version * tokens - sum(group.versions for group in step)
            train_end_s = now_s + train_s
            trained += (tokens, age, train_s)
        now_s = min(train_end_s, *(replica.next_s() for replica in replicas), inf)
        for number, length, started in (ended for replica in replicas for ended in replica.advance(now_s)):
            groups[number].unfinished -= 1
            groups[number].versions += length * (started + version) / 2  # as if it rose evenly meanwhile
        if now_s == train_end_s:
            version, train_end_s = version + 1, inf
            ends.append(np.array([now_s, *trained, sum(replica.idle_s for replica in replicas) / len(replicas)]))
    seconds, tokens, age, busy_s, idle_s = (ends[-1] - ends[num_unsteady]).tolist()
    return Forecast(max_staleness, tokens / seconds, age / tokens, 1.0 - busy_s / seconds, idle_s / seconds)


def _start_answers(waiting: deque[_Waiting], replicas: Sequence[_Replica], max_num_seqs: int, version: int) -> None:
    """Start waiting answers on the replicas that run the fewest, while these have room."""
    while waiting and len((least := min(replicas, key=lambda one: len(one.running))).running) < max_num_seqs:
        group, length = waiting.popleft()
        heappush(least.running, (least.clock + length, (group, length, version)))


def proposed(forecasts: Sequence[Forecast]) -> Forecast:
    """The smallest `max_staleness` within 2 % of the fastest."""
    best = max(one.tokens_per_s for one in forecasts)
    return next(one for one in forecasts if one.tokens_per_s >= NEAR_BEST * best)


def fitted_pace(loads: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(decode_s, answer_s) from (seconds, decode steps, tokens) under different loads, neither of them negative.

    A least-squares fit of seconds = decode_s * steps + answer_s * tokens; the variance of seconds grows with the steps.
    """
    seconds, steps, tokens = np.array(loads).T
    rows = np.stack([steps, tokens], 1) / np.sqrt(steps)[:, None]
    (decode_s, answer_s), *_ = np.linalg.lstsq(rows, seconds / np.sqrt(steps), rcond=None)
    if decode_s < 0:
        return 0.0, seconds.sum() / tokens.sum()
    return (decode_s, answer_s) if answer_s >= 0 and len(loads) > 1 else (seconds.sum() / steps.sum(), 0.0)


def staleness_advice(run: MeasuredRun, max_staleness: int) -> str:
    """A line for each `max_staleness`, and the proposal. Large runs are simulated with a share of their replicas."""
    share = min(1.0, MAX_REPLICAS / run.num_replicas)
    replicas, per_step = round(run.num_replicas * share), max(1, round(run.groups_per_step * share))
    small = replace(run, num_replicas=replicas, groups_per_step=per_step, train_s=run.train_s / share)
    forecasts = [forecast(small, choice) for choice in CHOICES]
    lines = ["max_staleness   tokens/s   mean age   trainer idle   rollout idle"]
    for one in forecasts:
        speed = f"{one.tokens_per_s / (small.num_replicas / run.num_replicas):8.1f}   {one.age:8.2f}"
        lines.append(f"{one.max_staleness:13}   {speed}   {one.trainer_idle:12.2f}   {one.rollout_idle:12.2f}")
    best = proposed(forecasts).max_staleness
    lines.append(f"smallest within 2 % of the fastest: trainer.max_staleness={best}; this run has {max_staleness}")
    return "\n".join(lines)
