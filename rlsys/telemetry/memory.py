"""A ledger of memory: what each stage on each worker used before, after and at its peak.

Sizes are bytes; metrics are GiB named `_gb` as in verl. CUDA numbers are of the current device and zero without one.
"""

import re
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import psutil

GIB = 1024**3
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"
_PEAK_RSS = re.compile(r"VmHWM:\s+(\d+) kB")


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory that this process uses now; peaks are since the last `reset_peaks` (RSS: since the start if refused)."""

    rss_bytes: int
    rss_peak_bytes: int
    cuda_allocated_bytes: int = 0
    cuda_allocated_peak_bytes: int = 0
    cuda_reserved_peak_bytes: int = 0


@dataclass
class MemoryRecord:
    """One stage on one worker: memory at its start and end (or now), and the highest in between."""

    worker: str
    stage: str
    rss_before_bytes: int
    rss_after_bytes: int
    rss_peak_bytes: int
    cuda_before_bytes: int
    cuda_after_bytes: int
    cuda_peak_bytes: int
    cuda_reserved_peak_bytes: int

    def continue_to(self, now: MemorySnapshot) -> None:
        """Take over what is used now and the peaks until now."""
        self.rss_after_bytes, self.cuda_after_bytes = now.rss_bytes, now.cuda_allocated_bytes
        self.rss_peak_bytes = max(self.rss_peak_bytes, now.rss_peak_bytes)
        self.cuda_peak_bytes = max(self.cuda_peak_bytes, now.cuda_allocated_peak_bytes)
        self.cuda_reserved_peak_bytes = max(self.cuda_reserved_peak_bytes, now.cuda_reserved_peak_bytes)


@dataclass
class MemoryLedger:
    """Records the stages of one worker, nested or concurrent; `worker` is e.g. "actor 0"."""

    worker: str
    _records: list[MemoryRecord] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Record one stage, also when it raises; usable as a listener of StageTimer."""
        with _boundaries:
            before = _new_peaks()
            rss, cuda = before.rss_bytes, before.cuda_allocated_bytes
            record = MemoryRecord(self.worker, name, rss, rss, 0, cuda, cuda, 0, 0)
            _open.append(record)
        try:
            yield
        finally:
            with _boundaries:
                _new_peaks()
                _open[:] = [one for one in _open if one is not record]
                self._records.append(record)

    def drain(self) -> list[MemoryRecord]:
        """What was recorded since the last call, one record a stage, ready to be sent to the driver."""
        with _boundaries:
            records, self._records = self._records, []
        return by_stage(records)


# Peaks belong to the process: a boundary of one ledger counts for the open stages of all.
_open: list[MemoryRecord] = []
_boundaries = threading.Lock()


def _new_peaks() -> MemorySnapshot:
    """Credit the peaks since the last boundary to every open stage and start new ones."""
    now = snapshot()
    for record in _open:
        record.continue_to(now)
    reset_peaks()
    return now


def snapshot() -> MemorySnapshot:
    """Memory of this process now; tens of microseconds, and never starts CUDA."""
    cuda = _cuda()
    sizes = () if cuda is None else (cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.max_memory_reserved())
    return MemorySnapshot(*_rss_bytes(), *sizes)


def reset_peaks() -> None:
    """Start new peaks of RSS (where the kernel allows it) and CUDA memory."""
    with suppress(OSError):  # refused in some sandboxes: the peak then counts from the start of the process
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS)
    cuda = _cuda()
    if cuda is not None:
        cuda.reset_peak_memory_stats()


def memory_metrics(records: Iterable[MemoryRecord]) -> dict[str, float]:
    """verl's `perf/*` memory names over all workers, and the peaks of every stage under `perf/memory/{stage}/`."""
    records = list(records)
    metrics = {
        "perf/max_memory_allocated_gb": max((r.cuda_peak_bytes for r in records), default=0) / GIB,
        "perf/max_memory_reserved_gb": max((r.cuda_reserved_peak_bytes for r in records), default=0) / GIB,
        "perf/cpu_memory_used_gb": host_used_bytes() / GIB,
    }
    for r in records:
        for name, size in (("rss_peak_gb", r.rss_peak_bytes), ("cuda_peak_gb", r.cuda_peak_bytes)):
            key = f"perf/memory/{r.stage}/{name}"
            if size:
                metrics[key] = max(metrics.get(key, 0.0), size / GIB)
    return metrics


def by_stage(records: Iterable[MemoryRecord]) -> list[MemoryRecord]:
    """One record per worker and stage in order of appearance: the last before/after, the highest peaks."""
    rows: dict[tuple[str, str], MemoryRecord] = {}
    peaks = [f.name for f in fields(MemoryRecord) if "peak" in f.name]
    for r in records:
        before = rows.get((r.worker, r.stage), r)
        rows[r.worker, r.stage] = replace(r, **{name: max(getattr(before, name), getattr(r, name)) for name in peaks})
    return list(rows.values())


def memory_table(records: Iterable[MemoryRecord]) -> str:
    """The ledger as text, one line for each record of `by_stage`; sizes in GiB."""
    columns = [f.name for f in fields(MemoryRecord)][2:]
    heads = ["worker", "stage", *(c.removesuffix("_bytes").replace("reserved_peak", "reserved") for c in columns)]
    lines = [heads] + [[r.worker, r.stage, *(f"{getattr(r, c) / GIB:.2f}" for c in columns)] for r in by_stage(records)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    pads = [str.ljust, str.ljust, *[str.rjust] * len(columns)]
    return "\n".join("  ".join(pad(cell, w) for pad, cell, w in zip(pads, line, widths)).rstrip() for line in lines)


def host_used_bytes() -> int:
    """Memory of the host in use by all processes: total minus available."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


def _rss_bytes() -> tuple[int, int]:
    """(now, peak) of this process."""
    now = psutil.Process().memory_info().rss
    peak = _PEAK_RSS.search(_STATUS.read_text()) if _STATUS.exists() else None
    return now, max(now, int(peak[1]) * 1024) if peak else now


def _cuda() -> Any:
    """torch.cuda if this process already uses it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
