"""`ipc` over two hosts on two GPUs of one: what NCCL_HOSTID separates crosses by NCCL, the rest by CUDA IPC."""

import os
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rlsys.weights.endpoints import WeightReceiver, WeightSender
from rlsys.weights.sharding_manager import ShardingManager
from scripts.weight_layouts import EngineSizes, fsdp_layouts
from tests.unit.weights.test_relay import SHAPES, Holder, engines_of, missing_bytes, model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HOSTS = ("a", "b")


class Rank:
    """A trainer or an engine on a GPU of its host, in a process of its own."""

    def __init__(self, side: str, rank: int) -> None:
        trained, served = fsdp_layouts(SHAPES, 2), engines_of(EngineSizes(dp_size=2, vocab_multiple=8), "bfloat16")
        layout = (trained if side == "trainer" else served)[rank]
        self.holder = Holder(layout, HOSTS[rank], f"cuda:{rank}")
        self.end: Any = (WeightSender if side == "trainer" else WeightReceiver)(self.holder)

    def train(self, seed: int) -> None:
        self.holder.take(model(seed))

    def holds(self, seed: int) -> bool:
        return self.holder.holds(model(seed), {})


def _work(pipe: Connection, side: str, rank: int) -> None:
    os.environ["NCCL_HOSTID"] = HOSTS[rank]
    torch.cuda.set_device(rank)
    worker = Rank(side, rank)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send(getattr(worker if hasattr(worker, method) else worker.end, method)(*args))
        except Exception as error:
            pipe.send(error)


class Answer:
    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def get(self, deadline_s: float | None = None) -> Any:
        assert self.pipe.poll(deadline_s)
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Group:
    """The ranks of one side, called as a WorkerGroup is."""

    world_size = len(HOSTS)

    def __init__(self, side: str) -> None:
        context = get_context("spawn")
        pipes = [context.Pipe() for _ in HOSTS]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_work, args=(theirs, side, rank), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> Answer:
        self.pipes[rank].send((method, args))
        return Answer(self.pipes[rank])

    def execute_all_async(self, method: str, *args: Any) -> list[Answer]:
        return [self.execute_rank_async(rank, method, *args) for rank in range(self.world_size)]


@pytest.fixture
def groups() -> Iterator[tuple[Group, Group]]:
    sides = Group("trainer"), Group("rollout")
    yield sides
    for process in (*sides[0].processes, *sides[1].processes):
        process.kill()


def test_each_half_crosses_once_and_the_other_is_read_in_place(groups: tuple[Group, Group]) -> None:
    trainers, engines = groups
    manager = ShardingManager(*groups, bucket_bytes=1 << 16, deadline_s=180.0)
    manager.connect()
    assert manager.executor == "ipc"
    trained, served = ([one.get(60) for one in group.execute_all_async("weight_layout")] for group in groups)
    for version, seed in ((1, 0), (2, 1)):
        assert [one.get(60) for one in trainers.execute_all_async("train", seed)] == [None, None]
        report = manager.push(version)
        assert report.network_bytes == missing_bytes(trained, served, {})
        assert all(one.get(60) for one in engines.execute_all_async("holds", seed))
    assert all(check.equal for check in manager.validate())
