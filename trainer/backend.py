"""Where workers run: this process, a Ray cluster that is there, or one started now."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import AutoTokenizer

from rlsys.config.schema.model import ModelConfig
from rlsys.config.schema.trainer import RayKwargsConfig
from rlsys.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup
from rlsys.single_controller.local import LocalWorkerGroup
from rlsys.single_controller.resource_pool import ResourcePoolManager
from rlsys.utils.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """The device, the classes that start workers there, and what to close at the end."""

    device: str
    group_cls: Callable[..., WorkerGroup]
    make_class: Callable[..., ClassWithInitArgs]
    make_manager: Callable[[Mapping[str, list[int]], Mapping[Any, str]], ResourcePoolManager[Any]]
    threads: int | None
    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_place(backend: str, device: str, ray_kwargs: RayKwargsConfig, *, ranks: int) -> Place:
    """The place for `ranks` processes; ConfigError if the device asked for is not there."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    if backend == "local":
        return _local_place(_device(device, torch.cuda.is_available()), threads)
    from rlsys.single_controller import ray as on_ray

    cluster = on_ray.connect(
        ray_kwargs.ray_init.model_dump(exclude_none=True), timeline_json_file=ray_kwargs.timeline_json_file
    )
    chosen = _device(device, any(node.num_gpus > 0 for node in on_ray.cluster_nodes()))
    limit = threads if chosen == "cpu" else None

    def group(pool: Any, made: Any, **options: Any) -> WorkerGroup:
        return on_ray.RayWorkerGroup(pool, made, num_threads=limit, **options)

    def manager(pools: Mapping[str, list[int]], mapping: Mapping[Any, str]) -> ResourcePoolManager[Any]:
        return on_ray.ResourcePoolManager(pools, mapping, use_gpu=chosen != "cpu", max_colocate_count=1)

    return Place(chosen, group, on_ray.RayClassWithInitArgs, manager, limit, cluster.close)


def _local_place(device: str, threads: int) -> Place:
    def manager(pools: Mapping[str, list[int]], mapping: Mapping[Any, str]) -> ResourcePoolManager[Any]:
        return ResourcePoolManager(pools, mapping, lambda nodes, share, _: ResourcePool(nodes, share))

    limit = threads if device == "cpu" else None
    return Place(device, LocalWorkerGroup, ClassWithInitArgs, manager, limit, lambda: None)


def _device(wanted: str, has_gpus: bool) -> str:
    if wanted == "cuda" and not has_gpus:
        raise ConfigError("trainer.device=cuda, but there is no CUDA device; use trainer.device=auto or cpu")
    return "cuda" if has_gpus and wanted != "cpu" else "cpu"


def load_tokenizer(model: ModelConfig, padding: int | None = None) -> Any:
    """The model's tokenizer with the configured template; it pads by `padding`, else its own, else the end token."""
    path = model.tokenizer_path or model.path
    assert path is not None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor_rollout_ref.model.path={path}: no tokenizer can be read there: {error}") from error
    if padding is not None:
        if padding >= len(tokenizer):
            why = f"the tokenizer in {path} has ids up to {len(tokenizer) - 1}"
            raise ConfigError(f"actor_rollout_ref.rollout.padding={padding}: {why}")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    elif tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer
