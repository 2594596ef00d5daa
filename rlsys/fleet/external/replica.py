"""External servers as the one replica of a fleet: their engine shares requests out, retries and fails over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.fleet.external.engine import RemoteEngine
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.protocol import DataProto
from rlsys.types import ModelRequest, ResponseDelta

MAX_CHUNK_ROWS = 32


@dataclass(frozen=True)
class ExternalReplica:
    """All servers as one replica."""

    engine: RemoteEngine
    name: str = "external servers"

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> Sequence[ResponseDelta]:
        return self.engine.exchange(new, wait_s=wait_s, cancel=cancel)

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.engine.health()

    def restart(self, deadline_s: float) -> None:
        """A no-op: the servers are restarted from outside, and the engine readmits them."""


class ExternalFleet(RolloutFleet):
    """A fleet over external servers that also scores responses and reports the servers' metrics."""

    def __init__(self, engine: RemoteEngine, *, generate_s: float) -> None:
        num_concurrent = engine.settings.max_concurrent
        rows = min(MAX_CHUNK_ROWS, num_concurrent)
        super().__init__(
            [ExternalReplica(engine)],
            chunk_rows=rows,
            max_in_flight=num_concurrent,
            deadlines=FleetDeadlines(generate_s=generate_s),
            max_restarts=0,
        )
        self.engine = engine

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`rollout_log_probs` (B, R) as the servers score the responses, which they do at temperature 1 only."""
        log_probs = self.engine.compute_log_prob(data, temperature=data.meta_info["temperature"])
        return DataProto.from_dict({"rollout_log_probs": log_probs})

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.engine.metrics()
