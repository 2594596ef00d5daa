"""vLLM's process groups and shared memory, in a process that has groups of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

SHARED_MEMORY = Path("/dev/shm")


def end_groups(shutdown: Callable[[], None], *, shared: bool) -> None:
    """Shut vLLM down and end its groups, so that another engine can start here.

    Where the default group is not vLLM's (`shared`) it stays: newer versions end all groups of the process otherwise.
    """
    import vllm.distributed.parallel_state as parallel_state

    end_all = parallel_state.destroy_distributed_environment
    if shared:
        parallel_state.destroy_distributed_environment = lambda: _end_world(parallel_state)
    try:
        shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    except ValueError:  # torch's answer for a group that ended with the default one
        if dist.is_initialized():
            raise
        _forget(parallel_state)
    finally:
        parallel_state.destroy_distributed_environment = end_all


def _forget(parallel_state: Any) -> None:
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)


def _end_world(parallel_state: Any) -> None:
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Where ranks serve together on CPU: the block in which they start shares memory under names of this job alone.

    vLLM names it after the ranks only, so that another job of the host, or what a killed one left, would be in the way.
    The names go when the block ends, for by then all ranks have it open; so nothing is ever left.
    """
    import vllm.distributed.device_communicators.cpu_communicator as cpu_communicator

    owner, made = cpu_communicator._CPUSHMDistributed, list[str]()
    make = owner.make_group_name

    def name(communicator: Any) -> str:
        made.append(
            "-".join(["rlsys", os.environ["MASTER_PORT"], communicator.unique_name, *map(str, communicator.ranks)])
        )
        return made[-1]

    owner.make_group_name = staticmethod(name)
    try:
        yield
    finally:
        owner.make_group_name = make
        for file in (file for group in made for file in SHARED_MEMORY.glob(f"{group}_*")):
            file.unlink(missing_ok=True)
