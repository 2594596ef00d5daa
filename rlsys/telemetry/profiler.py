"""Profiles of one process while it works: torch's profiler, ranges for nsys, or the history of CUDA's allocations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsys.config.schema.trainer import ProfilerConfig


@contextmanager
def profiled(config: ProfilerConfig, name: str) -> Iterator[None]:
    """Profile what this process does inside; torch and torch_memory leave `save_path`/`name`.json.gz or .pickle.

    nsys must run the job itself: `nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat ...`.
    """
    import torch

    folder = Path(config.save_path)
    folder.mkdir(parents=True, exist_ok=True)
    if config.tool == "torch":
        with torch.profiler.profile(record_shapes=True) as profiler:
            yield
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
    elif config.tool == "nsys":
        torch.cuda.profiler.start()
        with torch.cuda.nvtx.range(name), torch.autograd.profiler.emit_nvtx():
            yield
        torch.cuda.profiler.stop()
    else:
        torch.cuda.memory._record_memory_history()
        yield
        torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
