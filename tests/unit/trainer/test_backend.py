"""How many threads workers have for their operations on the CPU."""

import os
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from rlsys.config.schema.trainer import RayKwargsConfig, RunConfig
from rlsys.single_controller import ray as on_ray
from trainer.backend import start_backend


@pytest.mark.parametrize(("num_gpus", "given", "expected"), [(2, "", "1"), (0, "", "4"), (2, "5", "5")])
def test_workers_beside_gpus_have_one_thread_and_others_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, given: str, expected: str
) -> None:
    cluster = SimpleNamespace(watch_gcs=lambda _: None, close=lambda: None)
    monkeypatch.setattr(on_ray, "connect", lambda *_, **__: cluster)
    monkeypatch.setattr(on_ray, "cluster_nodes", lambda: [SimpleNamespace(num_gpus=num_gpus)])
    monkeypatch.setattr(on_ray, "node_size", lambda use_gpu: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    here = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", here.append)  # later tests fork this process
    backend = start_backend(RunConfig(n_gpus_per_node=2), RayKwargsConfig())
    workers = cast(partial, backend.group_cls).keywords["worker_env"].get("OMP_NUM_THREADS", given)
    assert (workers, here) == (expected, [] if given else [int(expected)])
