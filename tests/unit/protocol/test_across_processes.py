"""DataProto between real processes: Ray's object store without copies, and a process group."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlsys.protocol import DataProto, DataProtoFuture, all_gather_data_proto
from rlsys.utils.errors import DeadlineError
from tests.timing import scaled_s

ROOT = str(Path(__file__).resolve().parents[3])
NUM_BYTES = 50 << 20
WAIT_S = 120.0


@pytest.fixture(scope="module")
def workers(ray_cluster: object) -> Iterator[list[Any]]:
    held = [ray.remote(Worker).options(num_cpus=0.5).remote() for _ in range(2)]
    yield held
    for worker in held:
        ray.kill(worker)


class Worker:
    def __init__(self) -> None:
        self.rows = DataProto()

    def receive(self, rows: DataProto) -> dict[str, Any]:
        """What arrived, after writing to every kind of memory that did."""
        seen = {"sum": float(rows.batch["x"].sum()), "objects": rows.non_tensor_batch["o"].tolist()}
        rows.batch["x"] += 1
        rows.non_tensor_batch["n"].fill(0)
        return {**seen, "written": float(rows.batch["x"].sum())}

    def forward(self, rows: DataProto) -> DataProto:
        """The rows as they came, whose batch is not used."""
        return rows

    def resolve(self, future: DataProtoFuture) -> tuple[int, list[float]]:
        rows = future.get(scaled_s(WAIT_S))
        return len(rows), rows.batch["x"].flatten().tolist()

    def make(self, start: int) -> DataProto:
        return DataProto.from_dict({"x": torch.arange(start, start + 4.0)}, {"n": np.arange(4)}, {"t": 1})


def big_batch() -> DataProto:
    x = torch.ones(100, NUM_BYTES // 400)
    return DataProto.from_dict({"x": x}, {"n": np.arange(100.0), "o": [{"k": (i, None)} for i in range(100)]})


@dataclass(frozen=True)
class RefFuture:
    """What a worker group's future is to DataProtoFuture: something with `.get(deadline_s)`."""

    ref: list[Any]

    def get(self, deadline_s: float | None = None) -> DataProto:
        return ray.get(self.ref[0], timeout=deadline_s)


@pytest.mark.parametrize("num_rows", [1, 100])
def test_a_receiver_may_write_to_what_others_receive_too(workers: list[Any], num_rows: int) -> None:
    data = big_batch()[:num_rows]
    ref = ray.put(data)
    for worker in workers:
        seen = ray.get(worker.receive.remote(ref), timeout=scaled_s(WAIT_S))
        assert seen["sum"] == num_rows * NUM_BYTES / 400
        assert seen["written"] == num_rows * NUM_BYTES / 200
        assert seen["objects"][-1] == {"k": (num_rows - 1, None)}
    assert torch.equal(ray.get(ref).batch["x"], data.batch["x"])
    assert ray.get(ref).non_tensor_batch["n"].tolist() == data.non_tensor_batch["n"].tolist()


def test_rows_sent_on_or_joined_unused_belong_to_each_who_has_them(workers: list[Any]) -> None:
    data = big_batch()
    refs = [worker.forward.remote(part) for worker, part in zip(workers, data.chunk(2), strict=True)]
    for _ in range(2):
        joined = DataProto.concat(ray.get(refs, timeout=scaled_s(WAIT_S)))
        assert torch.equal(joined.batch["x"], data.batch["x"])
        joined.batch["x"].zero_()
        joined.non_tensor_batch["n"].fill(0)
    assert ray.get(refs[1]).non_tensor_batch["n"].tolist() == list(range(50, 100))


def test_later_writes_of_the_sender_do_not_arrive(workers: list[Any]) -> None:
    for data in (big_batch(), DataProto.from_dict({"x": torch.ones(3)})):
        expected = float(data.batch["x"].sum())
        ref = ray.put(data)
        data.batch["x"].zero_()
        data.non_tensor_batch.clear()
        assert float(ray.get(ref).batch["x"].sum()) == expected


def test_received_memory_outlives_its_reference(workers: list[Any]) -> None:
    x = ray.get(ray.put(big_batch())).batch["x"]
    for _ in range(6):
        ray.put(big_batch().repeat(1))
    assert float(x.min()) == float(x.max()) == 1.0


def test_futures_go_from_worker_to_worker_without_the_driver(workers: list[Any]) -> None:
    maker, worker = workers
    refs = [maker.make.remote(start) for start in (0, 4)]
    future = DataProtoFuture.concat([RefFuture([ref]) for ref in refs])
    parts = ray.get([worker.resolve.remote(part) for part in future.chunk(4)], timeout=scaled_s(WAIT_S))
    assert parts == [(2, [0.0, 1.0]), (2, [2.0, 3.0]), (2, [4.0, 5.0]), (2, [6.0, 7.0])]
    assert future.get(scaled_s(WAIT_S)).batch["x"].tolist() == list(range(8))
    assert [part.get().batch["x"].tolist() for part in future.chunk(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@dataclass(frozen=True)
class Slow:
    def get(self, deadline_s: float | None = None) -> DataProto:
        raise DeadlineError("actor rank 0", "update", deadline_s or 0.0)


def test_future_passes_the_deadline_on_and_names_unexpected_results() -> None:
    with pytest.raises(DeadlineError, match="within 0"):
        DataProtoFuture.concat([DataProto(), Slow()]).get(0.0)
    with pytest.raises(TypeError, match="instead of a DataProto"):
        DataProtoFuture.concat([{}]).get()


def test_future_applies_its_own_functions() -> None:
    parts = [DataProto.from_dict({"x": torch.tensor([i, -i])}) for i in range(3)]
    future = DataProtoFuture(collect_fn=lambda given: given[-1], futures=parts, dispatch_fn=lambda rows: rows[:1])
    assert future.get().batch["x"].tolist() == [2]
    assert [part.get().batch["x"].tolist() for part in future.chunk(1)] == [[2]]


def test_future_parts_merge_meta_of_all_parts() -> None:
    parts = [DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"metrics": {"m": i}}) for i in range(2)]
    assert DataProtoFuture.concat(parts).chunk(2)[1].get().meta_info == {"metrics": {"m": [0, 1]}}
    with pytest.raises(AssertionError, match="equal chunk"):
        DataProtoFuture.concat(parts).chunk(3)[0].get()


def gather(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = {"x": torch.full((2, 3), rank), "b": torch.tensor([True, False])}
    data = DataProto.from_dict(rows, {"s": ["ab" * (rank + 1), (rank,)], "n": np.arange(2) + rank}, {"rank": rank})
    all_gather_data_proto(data, dist.group.WORLD)
    data.save_to_disk(os.path.join(folder, str(rank)))
    dist.destroy_process_group()


def test_all_gather_gives_every_rank_all_rows(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    ranks = [context.Process(target=gather, args=(rank, str(tmp_path / "store"), str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    for rank in range(2):
        data = DataProto.load_from_disk(tmp_path / str(rank))
        assert data.batch["x"].tolist() == [[0] * 3, [0] * 3, [1] * 3, [1] * 3]
        assert data.batch["b"].tolist() == [True, False, True, False]
        assert data.non_tensor_batch["s"].tolist() == ["ab", (0,), "abab", (1,)]
        assert data.non_tensor_batch["n"].tolist() == [0, 1, 1, 2]
        assert data.meta_info == {"rank": rank}
