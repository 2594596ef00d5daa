"""What a run would gain by another `trainer.max_staleness`, from the answers and the speeds of its own first steps.

The schedule is simulated: step s trains on the next prompts in their order, and a prompt may start once the version
s - 1 - max_staleness is served, but no earlier than is needed for the trainer not to wait. Lengths are drawn from the
measured groups.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from random import Random

import numpy as np

CHOICES = (0, 1, 2, 4, 8)
NEAR_BEST, NUM_STEPS, MAX_REPLICAS = 0.98, 16, 4
WAITING_SHARE = 0.01
"""Share of its time that the trainer may wait so that tokens are younger."""
MANY_STEPS, FAST_FALL = 16, 0.1


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


class _Replica:
    """Answers that advance together; `clock` counts decode steps, `running` holds (clock at the end, group, ...)."""

    def __init__(self, run: MeasuredRun) -> None:
        self._run = run
        self.clock = self.now_s = self.idle_s = 0.0
        self.running: list[tuple[float, int, int, int]] = []

    @property
    def _decode_s(self) -> float:
        return self._run.decode_s + self._run.answer_s * len(self.running)

    def next_s(self) -> float:
        """When the next answer ends."""
        return self.now_s + (self.running[0][0] - self.clock) * self._decode_s if self.running else inf

    def advance(self, now_s: float) -> None:
        if self.running:
            self.clock += (now_s - self.now_s) / self._decode_s
        else:
            self.idle_s += now_s - self.now_s
        self.now_s = now_s


def next_lead(leads: Sequence[float], waited_steps: float, *, most: float, num_early: int = 0) -> float:
    """How many steps ahead of the trainer prompts start, from 1 on, after `leads` in the steps until now.

    The trainer has waited for the last step so many times what a step takes it: the lead becomes the one with which
    that step's prompts started and this more. It falls by `WAITING_SHARE` every step, so it settles where the
    trainer waits for that share of its time, and faster once `num_early` steps in a row, many, were each complete
    before the step ahead of them was trained on. It rises to `most` + 1, which counts as `most`: a trainer that waits
    with the full window does not give it up at the first step without.
    """
    lead = leads[-1]
    started = next((one for steps, one in enumerate(reversed(leads)) if steps >= one), leads[0])
    fall = WAITING_SHARE if num_early < MANY_STEPS else FAST_FALL
    return max(1.0, min(most + 1.0, max(lead, min(lead, started) + waited_steps) - fall))


def forecast(run: MeasuredRun, max_staleness: int) -> Forecast:
    """The measured run with this `max_staleness`, after the steps in which its window fills and the lead settles."""
    random, per_step = Random(0), run.groups_per_step
    replicas = [_Replica(run) for _ in range(run.num_replicas)]
    waiting: deque[tuple[int, int]] = deque()
    left, tokens, versions = dict[int, int](), dict[int, int](), dict[int, float]()
    now_s, train_end_s, busy_s, age, leads, step_s = 0.0, inf, 0.0, 0.0, [1.0], 0.0
    version = num_tokens = num_groups = 0
    marks: list[tuple[float, ...]] = []
    first = 3 * max_staleness + 1
    while version <= first + NUM_STEPS:
        for group in range(num_groups, (version + 1) * per_step + int(min(leads[-1], max_staleness) * per_step)):
            lengths = random.choice(run.groups)
            left[group], tokens[group], versions[group] = len(lengths), sum(lengths), 0.0
            waiting.extend((length, group) for length in lengths)
            num_groups = group + 1
        while waiting and len((least := min(replicas, key=lambda one: len(one.running))).running) < run.max_num_seqs:
            length, group = waiting.popleft()
            heappush(least.running, (least.clock + length, group, length, version))
        step = range(version * per_step, (version + 1) * per_step)
        if train_end_s == inf and not any(left[group] for group in step):
            trained = sum(tokens[group] for group in step)
            if marks:
                leads.append(next_lead(leads, (now_s - marks[-1][0]) / step_s, most=max_staleness))
            age += version * trained - sum(versions[group] for group in step)
            step_s = trained * run.train_s
            num_tokens, busy_s, train_end_s = num_tokens + trained, busy_s + step_s, now_s + step_s
        now_s = min(train_end_s, *(replica.next_s() for replica in replicas), inf)
        for replica in replicas:
            replica.advance(now_s)
            while replica.running and replica.running[0][0] <= replica.clock + 1e-6:
                _, group, length, started = heappop(replica.running)
                left[group] -= 1
                versions[group] += length * (started + version) / 2
        if now_s == train_end_s:
            version, train_end_s = version + 1, inf
            marks.append((now_s, num_tokens, age, busy_s, sum(one.idle_s for one in replicas) / len(replicas)))
    seconds, trained, aged, busy, idle = (end - start for start, end in zip(marks[first], marks[-1], strict=True))
    return Forecast(max_staleness, trained / seconds, aged / trained, 1.0 - busy / seconds, idle / seconds)


def proposed(forecasts: Sequence[Forecast]) -> Forecast:
    """The smallest `max_staleness` within 2 % of the fastest."""
    best = max(one.tokens_per_s for one in forecasts)
    return next(one for one in forecasts if one.tokens_per_s >= NEAR_BEST * best)


def fitted_pace(loads: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(decode_s, answer_s) from (seconds, decode steps, tokens) under different loads, neither of them negative."""
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
