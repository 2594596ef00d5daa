"""vLLM's process groups and shared memory, in a process that has groups of its own."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

SHARED_MEMORY = Path("/dev/shm")


def end_groups(shutdown: Callable[[], None], *, shared: bool) -> None:
    """Shut vLLM down and destroy its groups, so that another engine can start in this process.

    A default group that vLLM did not create (`shared`) is kept; newer versions would destroy all groups of the process.
    """
    import vllm.distributed.parallel_state as parallel_state

    end_all = partial(_end_world, parallel_state) if shared else parallel_state.destroy_distributed_environment
    try:
        with patch.object(parallel_state, "destroy_distributed_environment", end_all):
            shutdown()
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
    except ValueError:  # torch raises it for a group that was destroyed with the default one
        if dist.is_initialized():
            raise
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, parallel_state.GroupCoordinator):
                setattr(parallel_state, name, None)


def _end_world(parallel_state: Any) -> None:
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None


def share_cache_plans() -> None:
    """Have pipeline stages plan their caches together, so that those of unlike size have as many blocks.

    vLLM's plan with an external launcher knows the layers of this rank only.
    """
    import vllm.v1.engine.core as core
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    def plan(config: object, specs: list[object], memory: list[int]) -> list[object]:
        stages = get_pp_group()
        gathered = [(specs[0], memory[0])] * stages.world_size
        dist.all_gather_object(gathered, gathered[0], stages.cpu_group)
        return [get_kv_cache_configs(config, *map(list, zip(*gathered, strict=True)))[stages.rank_in_group]]

    core.get_kv_cache_configs = plan


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Within the block, ranks that serve together on CPU name their shared memory after this job.

    vLLM names it after the ranks only, which collides with other jobs of the host and with leftovers of killed ones.
    The names are unlinked at the end of the block, when all ranks have opened them, so that none is left behind.
    """
    import vllm.distributed.device_communicators.cpu_communicator as cpu_communicator

    made = list[str]()

    def name(group: Any) -> str:
        made.append("-".join(["rlsys", os.environ["MASTER_PORT"], group.unique_name, *map(str, group.ranks)]))
        return made[-1]

    try:
        with patch.object(cpu_communicator._CPUSHMDistributed, "make_group_name", staticmethod(name)):
            yield
    finally:
        for file in (file for group in made for file in SHARED_MEMORY.glob(f"{group}_*")):
            file.unlink(missing_ok=True)
