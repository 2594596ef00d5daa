"""External servers as the one replica of a fleet: their engine shares requests out, retries and fails over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsys.fleet.external.engine import RemoteEngine
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.fleet.replica import Answers, Work
from rlsys.protocol import DataProto
from rlsys.rollout.batch import from_responses, to_requests

MAX_CHUNK_ROWS = 32


@dataclass(frozen=True)
class ExternalReplica:
    """All servers as one replica."""

    engine: RemoteEngine
    name: str = "external servers"

    def generate(self, work: Work, deadline_s: float) -> Answers:
        if not isinstance(work, DataProto):
            return self.engine.complete(work)
        return from_responses(work, self.engine.complete(to_requests(work)))

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.engine.health()

    def restart(self, deadline_s: float) -> None:
        """A no-op: the servers are restarted from outside, and the engine readmits them."""


class ExternalFleet(RolloutFleet):
    """A fleet over external servers that also scores responses and reports the servers' metrics."""

    def __init__(self, engine: RemoteEngine, *, generate_s: float, max_staleness: int = 0) -> None:
        num_concurrent = engine.settings.max_concurrent
        rows = min(MAX_CHUNK_ROWS, num_concurrent)
        super().__init__(
            [ExternalReplica(engine)],
            chunk_rows=rows,
            max_in_flight=max(1, num_concurrent // rows),
            deadlines=FleetDeadlines(generate_s=generate_s),
            max_restarts=0,
            max_staleness=max_staleness,
        )
        self.engine = engine

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`rollout_log_probs` (B, R) as the servers score the responses, which they do at temperature 1 only."""
        log_probs = self.engine.compute_log_prob(data, temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"rollout_log_probs": log_probs})

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.engine.metrics()
