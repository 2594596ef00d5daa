"""Where workers run: this process, a Ray cluster that is there, or one started now."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rlsys.config.schema.model import ModelFolderConfig
from rlsys.config.schema.trainer import RayKwargsConfig, RunConfig
from rlsys.single_controller.base import ClassWithInitArgs, WorkerGroup
from rlsys.single_controller.local import LocalWorkerGroup
from rlsys.single_controller.resource_pool import ResourcePoolManager
from rlsys.utils.errors import ConfigError
from rlsys.utils.hosts import num_cores
from rlsys.utils.plugins import import_libraries
from trainer.job import exit_on_sigterm, exit_without_gcs


@dataclass(frozen=True)
class WorkerBackend:
    """The device, the classes that start workers there, and what to close at the end.

    `node_size` is the number of processes that the largest node has room for.
    """

    device: str
    group_cls: Callable[..., WorkerGroup]
    worker_cls: Callable[..., ClassWithInitArgs]
    make_manager: Callable[..., ResourcePoolManager]
    node_size: int
    close: Callable[[], None]


@contextmanager
def running_backend(
    run: RunConfig, ray_kwargs: RayKwargsConfig, *, num_ranks: int | None = None
) -> Iterator[WorkerBackend]:
    """A started backend, closed at the end; SIGTERM raises SystemExit meanwhile."""
    backend = start_backend(run, ray_kwargs, num_ranks=num_ranks)
    try:
        with exit_on_sigterm():
            yield backend
    finally:
        backend.close()


def start_backend(run: RunConfig, ray_kwargs: RayKwargsConfig, *, num_ranks: int | None = None) -> WorkerBackend:
    """The backend of a run of `num_ranks` processes, or of its `nnodes` x `n_gpus_per_node`.

    ConfigError if the device asked for does not exist.
    """
    if run.backend == "local":
        device = _device(run.device, torch.cuda.is_available())
        return WorkerBackend(device, LocalWorkerGroup, ClassWithInitArgs, ResourcePoolManager, 1, lambda: None)
    from rlsys.single_controller import ray as on_ray

    init = ray_kwargs.ray_init.model_dump(exclude_none=True)
    cluster = on_ray.connect(init, timeline_json_file=ray_kwargs.timeline_json_file, deadline_s=run.deadlines.start_s)
    cluster.watch_gcs(exit_without_gcs)
    device = _device(run.device, any(node.num_gpus > 0 for node in on_ray.cluster_nodes()))
    node_size = on_ray.node_size(use_gpu=device != "cpu")
    worker_env = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if "OMP_NUM_THREADS" not in os.environ:
        # Teams that together have more threads than there are cores wait for each other in every operation on the CPU.
        # Beside GPUs these are small, and the engines' schedulers need the cores: one thread, as with torchrun.
        in_node = max(1, min(num_ranks or run.nnodes * run.n_gpus_per_node, node_size))
        num_threads = 1 if device == "cuda" else max(1, num_cores() // in_node)
        torch.set_num_threads(num_threads)
        worker_env["OMP_NUM_THREADS"] = str(num_threads)
    manager = partial(on_ray.ResourcePoolManager, use_gpu=device != "cpu", max_colocate_count=1)
    group = partial(on_ray.RayWorkerGroup, worker_env=worker_env)
    return WorkerBackend(device, group, on_ray.RayClassWithInitArgs, manager, node_size, cluster.close)


def _device(wanted: str, has_gpus: bool) -> str:
    if wanted == "cuda" and not has_gpus:
        raise ConfigError("trainer.device=cuda, but there is no CUDA device; set trainer.device=auto or cpu")
    return "cuda" if has_gpus and wanted != "cpu" else "cpu"


def import_external_libs(models: Mapping[str, ModelFolderConfig]) -> tuple[tuple[str, str], ...]:
    """Import the `external_lib` of the models here; returns (key, library) pairs for the workers to do the same.

    ConfigError naming the key of one that cannot be imported.
    """
    given = tuple(
        (f"{section}.external_lib", str(Path(lib).expanduser().absolute()) if lib.endswith(".py") else lib)
        for section, model in models.items()
        if (lib := model.external_lib)
    )
    import_libraries(given)
    return given
