"""Shared test settings: one thread per process, no network, no tracker accounts."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # no worker that only waits for work
os.environ.setdefault("RAY_worker_niceness", "0")  # as in clusters that rlsys starts
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

gc.disable()  # while libraries and tests are imported


def pytest_collection_finish() -> None:
    """What was imported lives as long as this process and those forked from it: it is never looked through."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[object]:
    """One local Ray cluster for all tests that need one; it claims 8 CPUs and 2 GPUs, whatever the machine has."""
    from rlsys.single_controller.ray import connect

    with closing(connect({"num_cpus": 8, "num_gpus": 2})) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that trains in this process leaves no process group to those that fork their own ranks."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
