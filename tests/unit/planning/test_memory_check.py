"""scripts/bench/memory_check.py, which compares the plan with a run."""

import gc

import torch

from scripts.bench.memory_check import TensorBytes


def test_tensors_that_the_garbage_collector_does_not_visit_are_counted() -> None:
    """Engines freeze what lives when they start, of which gc names no object."""
    key, size = "allocated_bytes.all.current", 64 << 20
    before = TensorBytes().memory_stats()[key]
    kept = torch.zeros(size, dtype=torch.uint8)
    gc.freeze()
    try:
        assert TensorBytes().memory_stats()[key] - before >= kept.nbytes
    finally:
        gc.unfreeze()
