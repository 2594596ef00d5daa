"""Profiles of one process while it works: torch's profiler, ranges for nsys, or the history of CUDA's allocations."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlsys.config import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rlsys.config.introspect import replaced
from rlsys.config.schema.trainer import RayKwargsConfig
from rlsys.utils.errors import ConfigError

NSYS = "nsys profile --trace=cuda,nvtx,cublas --capture-range=cudaProfilerApi --capture-range-end=repeat --kill=none"
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


def under_nsys(config: PPOConfig | SFTConfig | RMConfig | DPOConfig) -> RayKwargsConfig:
    """`ray_kwargs` with the command that starts workers under nsys, if that profiles a step of them, unless they have
    a command or nsys runs this process. ConfigError where there is no nsys."""
    profiler, env = config.global_profiler, config.ray_kwargs.ray_init.runtime_env
    given = {"py_executable", "nsight"} & {*env} or "NSYS_PROFILING_SESSION_ID" in os.environ
    if profiler.tool != "nsys" or not profiler.steps or config.trainer.backend == "local" or given:
        return config.ray_kwargs
    if shutil.which("nsys") is None:
        raise ConfigError("global_profiler.tool=nsys: there is no nsys on this machine; install it, or set torch")
    (folder := Path(profiler.save_path).absolute()).mkdir(parents=True, exist_ok=True)
    command = f"{NSYS} -o {shlex.quote(f'{folder}/%h_%p')} {shlex.quote(sys.executable)}"
    return replaced(config, {"ray_kwargs.ray_init.runtime_env": {**env, "py_executable": command}}).ray_kwargs
