"""What a worker records about its own stages, to be collected by the controller: spans and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rlsys.telemetry.memory import MemoryLedger, MemoryRecord
from rlsys.telemetry.metrics import StageTimer
from rlsys.telemetry.trace import Event, Tracer


@dataclass(frozen=True)
class StageReport:
    """The stages of one process since its last report."""

    events: list[Event] = field(default_factory=list)
    memory: list[MemoryRecord] = field(default_factory=list)


class StageRecorder:
    """One worker's stages: `with recorder.stage("update_actor"):` puts it on the timeline and in the memory ledger.

    `listeners` are called for each stage too, as in StageTimer.
    """

    def __init__(self, worker: str, *listeners: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._tracer = Tracer(worker)
        self._ledger = MemoryLedger(worker)
        self.stage = StageTimer(self._tracer.span, self._ledger.stage, *listeners)

    def drain(self) -> StageReport:
        """Everything since the last call, small enough to travel with a result."""
        self.stage.drain()
        return StageReport(self._tracer.drain(), self._ledger.drain())


def merged(reports: Iterable[StageReport]) -> StageReport:
    """One report of several processes, for `Timeline.add` and `memory_metrics`."""
    reports = list(reports)
    return StageReport([e for r in reports for e in r.events], [m for r in reports for m in r.memory])
