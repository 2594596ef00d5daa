"""Profiles of one process while it works: torch's profiler, ranges for nsys, or the history of CUDA's allocations."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlsys.utils.errors import ConfigError

_running: list[ExitStack] = []


def start_profile(tool: str, path: str) -> None:
    """Profile this process until `stop_profile`; nothing if a profile runs already, as for another role here."""
    if not _running:
        with ExitStack() as stack:
            stack.enter_context(profiled(tool, Path(path)))
            _running.append(stack.pop_all())


def stop_profile() -> None:
    """Write the profile that runs, if one does."""
    while _running:
        _running.pop().close()


@contextmanager
def profiled(tool: str, path: Path) -> Iterator[None]:
    """Profile what this process does inside, also what fails; torch leaves `path`.json.gz, torch_memory `path`.pickle.

    nsys leaves what the nsys records that this process runs under. ConfigError for the last two without CUDA.
    """
    import torch

    if tool != "torch" and not torch.cuda.is_available():
        raise ConfigError(f"global_profiler.tool={tool} needs a GPU; set torch")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if tool == "torch":
            profiler = torch.profiler.profile(record_shapes=True)
            stack.callback(lambda: profiler.export_chrome_trace(f"{path}.json.gz"))
            stack.enter_context(profiler)
        elif tool == "nsys":
            torch.cuda.profiler.start()
            stack.callback(torch.cuda.profiler.stop)
            stack.callback(torch.cuda.synchronize)
            stack.enter_context(torch.cuda.nvtx.range(path.name))
            stack.enter_context(torch.autograd.profiler.emit_nvtx())
        else:
            torch.cuda.memory._record_memory_history()
            stack.callback(torch.cuda.memory._record_memory_history, enabled=None)
            stack.callback(torch.cuda.memory._dump_snapshot, f"{path}.pickle")
        yield
