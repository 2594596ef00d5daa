"""The memory ledger sees real allocations of this process."""

import mmap
import subprocess
import sys
import timeit
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import psutil
import pytest

from rlsys.telemetry import memory
from rlsys.telemetry.memory import (
    GIB,
    MemoryLedger,
    MemoryRecord,
    MemorySnapshot,
    memory_metrics,
    memory_table,
    snapshot,
)
from rlsys.telemetry.metrics import StageTimer
from tests.timing import scaled_s

MIB = 1024**2
SLACK = 12 * MIB


def touched(size: int) -> mmap.mmap:
    """Anonymous memory that is really there and goes away at once when closed."""
    block = mmap.mmap(-1, size)
    for i in range(0, size, mmap.PAGESIZE):
        block[i] = 1
    return block


def record(worker: str, stage: str, *gib: float) -> MemoryRecord:
    rss_before, rss, rss_peak, cuda_before, cuda, cuda_peak, reserved = (int(g * GIB) for g in gib)
    before = MemorySnapshot(rss_before, 0, cuda_before)
    return MemoryRecord(worker, stage, before, MemorySnapshot(rss, rss_peak, cuda, cuda_peak, reserved))


def test_a_stage_that_frees_what_it_took_shows_only_in_its_peak() -> None:
    ledger = MemoryLedger("actor 0")
    with ledger.stage("gen"):
        touched(96 * MIB).close()
    with ledger.stage("quiet"):
        pass
    gen, quiet = ledger.drain()
    assert (gen.worker, gen.stage) == ("actor 0", "gen")
    assert gen.after.rss_peak_bytes - gen.before.rss_bytes == pytest.approx(96 * MIB, abs=SLACK)
    assert gen.after.rss_bytes - gen.before.rss_bytes < SLACK
    assert quiet.after.rss_peak_bytes - quiet.before.rss_bytes < SLACK
    assert ledger.drain() == []


def test_a_peak_inside_a_nested_stage_counts_for_the_outer_one_too() -> None:
    ledger = MemoryLedger("actor 0")
    timer = StageTimer(ledger.stage)
    with timer("step"):
        with timer("inner"):
            touched(96 * MIB).close()
        with timer("after"):
            pass
    peaks = {r.stage: r.after.rss_peak_bytes - r.before.rss_bytes for r in ledger.drain()}
    assert peaks["step"] == pytest.approx(96 * MIB, abs=SLACK)
    assert peaks["inner"] == pytest.approx(96 * MIB, abs=SLACK)
    assert peaks["after"] < SLACK


def test_a_peak_in_a_stage_of_another_worker_of_this_process_counts_too() -> None:
    controller, actor = MemoryLedger("controller"), MemoryLedger("actor 0")
    with controller.stage("update"):
        with actor.stage("update_actor"):
            touched(96 * MIB).close()
        with actor.stage("after"):
            pass
    (record,) = controller.drain()
    assert record.after.rss_peak_bytes - record.before.rss_bytes == pytest.approx(96 * MIB, abs=SLACK)
    assert [r.stage for r in actor.drain()] == ["update_actor", "after"]


def test_a_stage_that_raises_is_recorded() -> None:
    ledger = MemoryLedger("actor 0")
    with pytest.raises(MemoryError), ledger.stage("update"):
        raise MemoryError
    assert [r.stage for r in ledger.drain()] == ["update"]


def test_snapshot_is_light_and_does_not_import_torch() -> None:
    root = Path(__file__).resolve().parents[3]
    code = f"""
import sys; sys.path.insert(0, {str(root)!r})
from rlsys.telemetry.memory import snapshot
assert snapshot().rss_bytes > 1e6
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled_s(60), check=True
    )
    assert done.stdout == "False\n"
    assert min(timeit.repeat(snapshot, number=1, repeat=100)) < scaled_s(0.005)


def test_metrics_take_the_highest_over_workers() -> None:
    metrics = memory_metrics(
        [
            record("actor 0", "gen", 1, 1, 2.0, 1, 1, 3.0, 4.0),
            record("actor 1", "gen", 1, 1, 2.5, 1, 1, 1.0, 8.0),
            record("actor 0", "update", 1, 1, 0.5, 0, 0, 0, 0),
        ]
    )
    used, host = metrics.pop("perf/cpu_memory_used_gb"), psutil.virtual_memory()
    assert used == pytest.approx((host.total - host.available) / GIB, rel=0.2)
    assert metrics == {
        "perf/max_memory_allocated_gb": 3.0,
        "perf/max_memory_reserved_gb": 8.0,
        "perf/memory/gen/rss_peak_gb": 2.5,
        "perf/memory/gen/cuda_peak_gb": 3.0,
        "perf/memory/update/rss_peak_gb": 0.5,
    }


def test_no_records_give_zeros() -> None:
    metrics = memory_metrics([])
    assert metrics["perf/max_memory_allocated_gb"] == 0.0
    assert metrics["perf/cpu_memory_used_gb"] > 0


def test_table_keeps_the_highest_peak_of_a_stage() -> None:
    table = memory_table(
        [
            record("actor 0", "gen", 1, 1, 5, 0, 0, 2, 3),
            record("actor 0", "update_actor", 1, 1, 1, 0, 0, 0, 0),
            record("actor 0", "gen", 2, 3, 4, 0, 0, 1, 1),
        ]
    )
    assert table.splitlines() == [
        "worker   stage         rss_before  rss_after  rss_peak  cuda_before  cuda_after  cuda_peak  cuda_reserved",
        "actor 0  gen                 2.00       3.00      5.00         0.00        0.00       2.00           3.00",
        "actor 0  update_actor        1.00       1.00      1.00         0.00        0.00       0.00           0.00",
    ]


def test_what_a_sleeping_vllm_gave_back_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the whole of it; vLLM's allocator says which parts the GPU has."""
    stats = {"allocated_bytes.all.current": 90, "allocated_bytes.all.peak": 100, "reserved_bytes.all.peak": 130}
    parts = [
        SimpleNamespace(handle=(0, size), is_asleep=asleep) for size, asleep in ((20, True), (7, True), (9, False))
    ]
    vllm = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=None))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cast(ModuleType, vllm))
    monkeypatch.setattr(memory, "_cuda", lambda: SimpleNamespace(memory_stats=lambda: stats))
    serving = SimpleNamespace(pointer_to_data=dict(enumerate(parts)))
    for allocator, held in ((None, (90, 100, 130)), (serving, (63, 73, 103))):
        vllm.CuMemAllocator.instance = allocator
        now = snapshot()
        assert (now.cuda_bytes, now.cuda_peak_bytes, now.cuda_reserved_peak_bytes) == held


@pytest.mark.gpu
def test_cuda_peaks_are_seen() -> None:
    import torch

    torch.zeros(1, device="cuda")
    ledger = MemoryLedger("actor 0")
    with ledger.stage("gen"):
        block = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        del block
    (gen,) = ledger.drain()
    assert gen.after.cuda_peak_bytes - gen.before.cuda_bytes >= 64 * MIB
    assert gen.after.cuda_bytes == gen.before.cuda_bytes
