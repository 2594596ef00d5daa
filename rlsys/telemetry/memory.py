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

from rlsys.utils.tables import aligned

GIB = 1024**3
COLUMNS = ("rss_before", "rss_after", "rss_peak", "cuda_before", "cuda_after", "cuda_peak", "cuda_reserved")
_STATUS, _CLEAR_REFS, _RESET_PEAK_RSS = Path("/proc/self/status"), Path("/proc/self/clear_refs"), "5"
_RSS = re.compile(rb"(VmRSS|VmHWM):\s+(\d+) kB")


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory that this process uses now; peaks are since the last `reset_peaks` (RSS: since the start if refused)."""

    rss_bytes: int
    rss_peak_bytes: int
    cuda_bytes: int = 0
    cuda_peak_bytes: int = 0
    cuda_reserved_peak_bytes: int = 0

    def with_peaks_of(self, other: "MemorySnapshot") -> "MemorySnapshot":
        """The same with the higher peaks of the two."""
        peaks = [field.name for field in fields(self) if "peak" in field.name]
        return replace(self, **{name: max(getattr(self, name), getattr(other, name)) for name in peaks})


@dataclass
class MemoryRecord:
    """One stage on one worker: memory at its start, and at its end (or now) with the highest in between."""

    worker: str
    stage: str
    before: MemorySnapshot
    after: MemorySnapshot


@dataclass
class MemoryLedger:
    """Records the stages of one worker, nested or concurrent; `worker` is e.g. "actor 0"."""

    worker: str
    _records: list[MemoryRecord] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Record one stage, also when it raises; usable as a listener of StageTimer."""
        with _boundaries:
            record = MemoryRecord(self.worker, name, _new_peaks(), MemorySnapshot(0, 0))
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
        record.after = now.with_peaks_of(record.after)
    reset_peaks()
    return now


def snapshot() -> MemorySnapshot:
    """Memory of this process now; tens of microseconds, and never starts CUDA."""
    stats = cuda.memory_stats() if (cuda := _cuda()) is not None else {}
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak")
    asleep = _asleep_bytes()
    return MemorySnapshot(*_rss_bytes(), *(max(0, stats.get(name, 0) - asleep) for name in names))


def _asleep_bytes() -> int:
    """What a vLLM that sleeps in this process has given back to the GPU, which torch counts as allocated."""
    allocator = getattr(sys.modules.get("vllm.device_allocator.cumem"), "CuMemAllocator", None)
    held = list(allocator.instance.pointer_to_data.values()) if allocator and allocator.instance else []
    return sum(data.handle[1] for data in held if data.is_asleep)


def reset_peaks() -> None:
    """Start new peaks of RSS (where the kernel allows it) and CUDA memory."""
    with suppress(OSError):  # refused in some sandboxes: the peak then counts from the start of the process
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS)
    if (cuda := _cuda()) is not None:
        cuda.reset_peak_memory_stats()


def memory_metrics(records: Iterable[MemoryRecord]) -> dict[str, float]:
    """verl's `perf/*` memory names over all workers, and the peaks of every stage under `perf/memory/{stage}/`."""
    records, host = list(records), psutil.virtual_memory()
    metrics = {
        "perf/max_memory_allocated_gb": max((r.after.cuda_peak_bytes for r in records), default=0) / GIB,
        "perf/max_memory_reserved_gb": max((r.after.cuda_reserved_peak_bytes for r in records), default=0) / GIB,
        "perf/cpu_memory_used_gb": (host.total - host.available) / GIB,
    }
    for r in records:
        for name, size in (("rss_peak_gb", r.after.rss_peak_bytes), ("cuda_peak_gb", r.after.cuda_peak_bytes)):
            key = f"perf/memory/{r.stage}/{name}"
            if size:
                metrics[key] = max(metrics.get(key, 0.0), size / GIB)
    return metrics


def by_stage(records: Iterable[MemoryRecord]) -> list[MemoryRecord]:
    """One record per worker and stage in order of appearance: the last before/after, the highest peaks."""
    rows: dict[tuple[str, str], MemoryRecord] = {}
    for r in records:
        rows[r.worker, r.stage] = replace(r, after=r.after.with_peaks_of(rows.get((r.worker, r.stage), r).after))
    return list(rows.values())


def memory_table(records: Iterable[MemoryRecord]) -> str:
    """The ledger as text, one line for each record of `by_stage`; sizes in GiB."""
    lines = [["worker", "stage", *COLUMNS]]
    for r in by_stage(records):
        rss, cuda = (r.before.rss_bytes, r.after.rss_bytes), (r.before.cuda_bytes, r.after.cuda_bytes)
        sizes = (*rss, r.after.rss_peak_bytes, *cuda, r.after.cuda_peak_bytes, r.after.cuda_reserved_peak_bytes)
        lines.append([r.worker, r.stage, *(f"{size / GIB:.2f}" for size in sizes)])
    return aligned(lines, num_left=2)


def _rss_bytes() -> tuple[int, int]:
    """(now, peak) of this process."""
    sizes = {name: int(kib) * 1024 for name, kib in _RSS.findall(_STATUS.read_bytes())} if _STATUS.exists() else {}
    now = sizes.get(b"VmRSS") or psutil.Process().memory_info().rss
    return now, max(now, sizes.get(b"VmHWM", 0))


def _cuda() -> Any:
    """torch.cuda if this process already uses it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
