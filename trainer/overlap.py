"""How much of each step the trainer and the rollout work at the same time."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from rlsys.fleet.fleet import RolloutFleet
from trainer.generation import new_counts


class OverlapMeter:
    """Measures from one batch to the next."""

    def __init__(self, fleet: RolloutFleet) -> None:
        self._fleet = fleet
        self._counts: Mapping[str, float] = {}
        self._since_s, self._waited_s, self._idle_s = time.monotonic(), 0.0, 0.0

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Surround what the trainer waits for."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - start_s

    def new_counts(self) -> dict[str, float]:
        """What the fleet has counted since the last call, and its replicas that are ready now."""
        before, self._counts = self._counts, self._fleet.metrics()
        return new_counts(self._counts, before)

    def shares(self) -> dict[str, float]:
        """Shares of the time since the last call in which the trainer, a replica or neither of them waited."""
        now_s, idle_s, ready = time.monotonic(), self._fleet.idle_s(), self._fleet.metrics()["rollout/replicas_ready"]
        span_s = max(now_s - self._since_s, 1e-9)
        trainer = min(1.0, self._waited_s / span_s)
        rollout = min(1.0, (idle_s - self._idle_s) / (span_s * max(1.0, ready)))
        self._since_s, self._waited_s, self._idle_s = now_s, 0.0, idle_s
        overlap = max(0.0, 1.0 - trainer - rollout)
        return {"perf/trainer_idle": trainer, "perf/rollout_idle": rollout, "perf/overlap": overlap}
