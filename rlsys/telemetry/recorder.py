"""What a worker records about its own stages, to be collected by the controller: spans and memory."""

import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from rlsys.telemetry.memory import GIB, MemoryLedger, MemoryRecord, snapshot
from rlsys.telemetry.metrics import StageListener, StageTimer
from rlsys.telemetry.trace import JOINED, Event, Tracer


@dataclass(frozen=True)
class StageReport:
    """The stages of one process since its last report."""

    events: list[Event] = field(default_factory=list)
    memory: list[MemoryRecord] = field(default_factory=list)


class StageRecorder:
    """One worker's stages: `with recorder.stage("update_actor"):` puts it on the timeline and in the memory ledger.

    It is a range in a profile of this thread, too, and the memory at its end a curve on the timeline. `listeners` are
    called for each stage as well, as in StageTimer.
    """

    def __init__(self, worker: str, *listeners: StageListener) -> None:
        self.tracer = Tracer(worker)
        self._ledger = MemoryLedger(worker)
        self.stage = StageTimer(self.tracer.span, _profile_range, self._memory_curve, self._ledger.stage, *listeners)

    def drain(self) -> StageReport:
        """Everything since the last call, small enough to travel with a result."""
        return StageReport(self.tracer.drain(), self._ledger.drain())

    @contextmanager
    def _memory_curve(self, stage: str) -> Generator[None]:
        yield
        if stage not in JOINED:
            now = snapshot()
            sizes = {"host": now.rss_bytes / GIB} | ({"gpu": gpu / GIB} if (gpu := now.cuda_bytes) else {})
            self.tracer.counter("memory (GiB)", sizes)


def _profile_range(stage: str) -> AbstractContextManager[object]:
    if "torch" not in sys.modules:
        return nullcontext()
    from torch.profiler import record_function

    return record_function(stage)


def merged(reports: Iterable[StageReport]) -> StageReport:
    """One report of several processes, for `Timeline.add` and `memory_metrics`."""
    reports = list(reports)
    return StageReport([e for r in reports for e in r.events], [m for r in reports for m in r.memory])
