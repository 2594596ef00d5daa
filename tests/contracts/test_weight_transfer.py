"""The contract of every executor: real processes, real engines, faults at every point.

Another executor joins by a function in `EXECUTORS` that builds the groups and the manager.
"""

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlsys.interfaces import WeightTransfer
from rlsys.rollout.base import EngineContext
from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import Box, ModelRequest, SamplingParams, Shard, TransferReport, WeightLayout
from rlsys.utils.errors import DeadlineError, WeightTransferError
from rlsys.weights.endpoints import WeightReceiver, WeightSender
from rlsys.weights.executors.in_process import LocalReshard
from rlsys.weights.sharding_manager import FSDPHFShardingManager, ShardingManager, choose
from tests.timing import scaled_s

REQUEST = ModelRequest((5, 6, 7), SamplingParams(12, temperature=0.0, ignore_eos=True))
Fault = Callable[[], None]


def tiny_model(seed: int, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=67,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


class ShardedTrainer:
    """A trainer rank that holds an uneven dim-0 shard of every tensor; `fault` runs when its tensors are asked for."""

    def __init__(self, rank: int, world_size: int, host: str = "here") -> None:
        self.rank, self.world_size, self.host = rank, world_size, host
        self.fault: Fault = lambda: None
        self.train(0)

    def train(self, seed: int) -> None:
        """Take the weights of another model, as a step would change them."""
        model = tiny_model(seed)
        self.full = {name: p.detach() for name, p in model.named_parameters()}
        self.tensors = {n: t[slice(*self._rows(t.shape[0]))].clone() for n, t in self.full.items()}

    def _rows(self, size: int) -> tuple[int, int]:
        """As FSDP cuts: equal chunks, the last ones short or empty."""
        chunk = -(-size // self.world_size)
        return min(size, self.rank * chunk), min(size, (self.rank + 1) * chunk)

    def weight_layout(self) -> WeightLayout:
        shards = []
        for name, tensor in self.full.items():
            start, stop = self._rows(tensor.shape[0])
            if stop > start:
                box = Box(name, (start, *[0] * (tensor.ndim - 1)), (stop - start, *tensor.shape[1:]))
                shards.append(Shard(box, name, (0,) * tensor.ndim))
        shapes = {name: tuple(tensor.shape) for name, tensor in self.full.items()}
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        return WeightLayout(self.rank, self.host, tuple(shards), shapes, dict.fromkeys(shapes, "float32"), aliases)

    def local_tensors(self) -> dict[str, Tensor]:
        self.fault()
        return self.tensors

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        self.fault()
        yield from ([item] for item in self.full.items())


class Worker:
    """What the tests call on both kinds of worker besides their own methods."""

    trainer: ShardedTrainer
    rollout: HFRollout

    def train(self, seed: int) -> None:
        self.trainer.train(seed)

    def arm(self, what: str) -> None:
        """At the next send: die, hang or raise."""
        faults: dict[str, Fault] = {
            "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "hang": lambda: time.sleep(1000),
            "raise": lambda: ctypes.string_at if not _fail() else None,
            "nothing": lambda: None,
        }
        self.trainer.fault = faults[what]

    def complete(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        response = self.rollout.generate([REQUEST])[0]
        return response.output_tokens, response.output_versions

    def health(self) -> dict[str, Any]:
        return self.rollout.health()

    def maps(self, name: str = "rlsys-weights") -> int:
        """The number of shared memories that this process has mapped."""
        return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def _fail() -> bool:
    raise RuntimeError("the optimizer is in the way")


class TrainerWorker(WeightSender, Worker):
    def __init__(self, rank: int, world_size: int, host: str = "here") -> None:
        self.trainer = ShardedTrainer(rank, world_size, host)
        super().__init__(self.trainer)  # pyrefly: ignore

    def step_in_place(self) -> None:
        """Change the weights where they are."""
        for tensor in (*self.trainer.tensors.values(), *self.trainer.full.values()):
            tensor.add_(1.0)


class ArmedRollout(HFRollout):
    """An engine with a fault in the middle of an update."""

    fault: Fault = staticmethod(lambda: None)

    def begin_update(self) -> None:
        super().begin_update()
        self.fault()


class RolloutWorker(WeightReceiver, Worker):
    def __init__(self, rank: int, dtype: torch.dtype, host: str = "here") -> None:
        context = EngineContext(load_format="dummy", rank=rank, host=host)
        self.rollout = ArmedRollout(tiny_model(999, dtype), context=context)
        super().__init__(self.rollout)

    def kill_in_update(self, pid: int, by: signal.Signals = signal.SIGKILL) -> None:
        """When the next update begins, kill or stop a process; 0 is this one, -1 none."""

        def fault() -> None:
            os.kill(pid or os.getpid(), by)
            time.sleep(0.3)

        self.rollout.fault = fault if pid >= 0 else lambda: None

    def raise_in_update(self, message: str) -> None:
        def fault() -> None:
            raise RuntimeError(message)

        self.rollout.fault = fault

    def damage(self, by: float = 1.0) -> None:
        """Change one value of the model, as a stray write would; its negative mends it."""
        self.rollout.model.model.norm.weight[3] += by

    def damage_in_update(self) -> None:
        """In the middle of the next updates change one byte of what the trainer exports, as a stray write would."""
        copies = [copy for copy in self._side.plan.copies if copy.tensor == "model.norm.weight"]
        name = copies[0].source_local
        self.rollout.fault = lambda: self._side._imported[0].tensors[name].view(torch.uint8)[5].bitwise_xor_(1)


class ColocatedWorker:
    """A process with a worker of each role; the trainer's has the whole model, or a shard."""

    def __init__(self, rank: int, num_shards: int, dtype: torch.dtype) -> None:
        self.trainer, self.rollout = TrainerWorker(rank % num_shards, num_shards), RolloutWorker(rank, dtype)
        self.local: LocalReshard | None = None

    def call(self, role: str, method: str, *args: Any) -> Any:
        if method == "reshard_weights":
            self.local = self.local or LocalReshard(self.trainer.engine, self.rollout.engine)
            return self.local.push(*args)
        return getattr(getattr(self, role), method)(*args)


@dataclass
class PipeFuture:
    """The result of a call in one process; results of a process come in the order of the calls."""

    worker: "PipeWorker"
    number: int

    def get(self, deadline_s: float | None = None) -> Any:
        return self.worker.answer(self.number, deadline_s or scaled_s(60.0))


class PipeWorker:
    """A worker object in a forked process, called through a pipe."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.name, self.build = name, build
        self.start()

    def start(self) -> None:
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.build), daemon=True)
        self.process.start()
        theirs.close()
        self.num_calls, self.results = 0, dict[int, Any]()

    def call(self, method: str, *args: Any) -> PipeFuture:
        self.num_calls += 1
        try:
            self.pipe.send((self.num_calls, method, args))
        except BrokenPipeError:
            self.results[self.num_calls] = ConnectionError(f"{self.name} is dead")
        return PipeFuture(self, self.num_calls)

    def answer(self, number: int, deadline_s: float) -> Any:
        end_s = time.monotonic() + deadline_s
        while number not in self.results:
            if not self.pipe.poll(max(0.0, end_s - time.monotonic())):
                raise DeadlineError(self.name, "answer", deadline_s)
            try:
                received, answer = self.pipe.recv()
            except (EOFError, ConnectionResetError):
                raise ConnectionError(f"{self.name} is dead") from None
            self.results[received] = answer
        if isinstance(answer := self.results.pop(number), Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


def _work(pipe: Connection, build: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    worker = build()
    while True:
        number, method, args = pipe.recv()
        try:
            pipe.send((number, getattr(worker, method)(*args)))
        except Exception as error:
            pipe.send((number, error))


class PipeGroup:
    """Workers in forked processes, called as a WorkerGroup is."""

    def __init__(self, name: str, builds: Sequence[Callable[[], Any]]) -> None:
        self.workers = [PipeWorker(f"{name} rank {rank}", build) for rank, build in enumerate(builds)]

    @property
    def world_size(self) -> int:
        return len(self.workers)

    def execute_all_async(self, method: str, *args: Any) -> list[PipeFuture]:
        return [worker.call(method, *args) for worker in self.workers]

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> PipeFuture:
        return self.workers[rank].call(method, *args)

    def all(self, method: str, *args: Any) -> list[Any]:
        return [answer.get(20.0) for answer in self.execute_all_async(method, *args)]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


@dataclass
class Bench:
    trainers: PipeGroup
    rollouts: PipeGroup
    manager: ShardingManager


def remote_bench(
    stack: ExitStack,
    num_trainers: int,
    num_rollouts: int,
    dtype: torch.dtype,
    deadline_s: float,
    *,
    executor: Any = "shm",
    num_hosts: int = 1,
) -> Bench:
    hosts = [("here", "there")[rank % num_hosts] for rank in range(num_trainers)]
    there = [hosts[rank % num_trainers] for rank in range(num_rollouts)]
    builds = [lambda r=r: TrainerWorker(r, num_trainers, hosts[r]) for r in range(num_trainers)]
    trainers = PipeGroup("trainer", builds)
    stack.callback(trainers.close)
    rollouts = PipeGroup("rollout", [lambda r=r: RolloutWorker(r, dtype, there[r]) for r in range(num_rollouts)])
    stack.callback(rollouts.close)
    disk = {"disk_root": stack.enter_context(TemporaryDirectory())} if executor == "disk" else {}
    manager = FSDPHFShardingManager(
        trainers, rollouts, executor=executor, deadline_s=deadline_s, bucket_bytes=1000, **disk
    )
    return Bench(trainers, rollouts, manager)


class RoleGroup(PipeGroup):
    """The workers of one role in processes of both."""

    def __init__(self, group: PipeGroup, role: str) -> None:
        self.workers, self.role = group.workers, role

    def execute_all_async(self, method: str, *args: Any) -> list[PipeFuture]:
        return super().execute_all_async("call", self.role, method, *args)

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> PipeFuture:
        return super().execute_rank_async(rank, "call", self.role, method, *args)


def local_bench(
    stack: ExitStack, num_trainers: int, num_rollouts: int, dtype: torch.dtype, deadline_s: float, num_shards: int = 1
) -> Bench:
    builds = [lambda r=r: ColocatedWorker(r, num_shards, dtype) for r in range(num_trainers)]
    group = PipeGroup("colocated", builds)
    stack.callback(group.close)
    trainers, rollouts = RoleGroup(group, "trainer"), RoleGroup(group, "rollout")
    return Bench(trainers, rollouts, ShardingManager(trainers, rollouts, executor="local", deadline_s=deadline_s))


HOSTS = {"ipc over hosts": partial(remote_bench, executor="ipc", num_hosts=2)}
EXECUTORS = {name: partial(remote_bench, executor=name) for name in ("shm", "ipc", "nccl", "disk", "gather")} | HOSTS
REMOTE = [*EXECUTORS]
EXECUTORS["local"] = local_bench


@contextmanager
def bench_of(
    executor: str,
    *,
    num_trainers: int = 2,
    num_rollouts: int = 2,
    dtype: torch.dtype = torch.float32,
    deadline_s: float = 20.0,
) -> Iterator[Bench]:
    with ExitStack() as stack:
        bench = EXECUTORS[executor](stack, num_trainers, num_rollouts, dtype, scaled_s(deadline_s))
        bench.manager.connect()
        yield bench


def expected_tokens(seed: int, dtype: torch.dtype = torch.float32) -> tuple[int, ...]:
    return HFRollout(tiny_model(seed, dtype)).generate([REQUEST])[0].output_tokens


def assert_serves(bench: Bench, seed: int, version: int, dtype: torch.dtype = torch.float32) -> None:
    wanted = (expected_tokens(seed, dtype), (version,) * 12)
    assert bench.rollouts.all("complete") == [wanted] * bench.rollouts.world_size


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("num_trainers", [1, 3])
def test_a_push_brings_every_engine_to_the_trainers_weights(executor: str, num_trainers: int) -> None:
    with bench_of(executor, num_trainers=num_trainers) as bench:
        manager = bench.manager
        assert isinstance(manager, WeightTransfer)
        reports = list[TransferReport]()
        for version, seed in [(0, 0), (1, 1), (2, 0)]:
            bench.trainers.all("train", seed)
            reports.append(manager.push(version))
            assert_serves(bench, seed, version)
        num_bytes = sum(p.numel() * 4 for p in tiny_model(0).parameters())
        assert [report.num_bytes for report in reports] == [num_bytes * bench.rollouts.world_size] * 3
        assert [report.version for report in reports] == [0, 1, 2]
        assert {report.executor for report in reports} == {executor.removesuffix(" over hosts")}
        assert reports[0].checksum == reports[2].checksum != reports[1].checksum
        assert all(0 < report.seconds < scaled_s(20) for report in reports)
        manager.close()
        manager.close()


def test_shards_beside_engines_are_gathered() -> None:
    with ExitStack() as stack:
        bench = local_bench(stack, 2, 2, torch.float32, scaled_s(20.0), num_shards=2)
        bench.manager.connect()
        assert bench.manager.push(1).executor == "gather"
        assert_serves(bench, 0, 1)


def test_weights_that_change_where_they_are_are_copied_again(executor: str) -> None:
    with bench_of(executor) as bench:
        checksums = [bench.manager.push(1).checksum]
        for step in (2, 3):
            bench.trainers.all("step_in_place")
            checksums.append(bench.manager.push(step).checksum)
            assert all(check.equal for check in bench.manager.validate())
        assert len({*checksums}) == 3


def test_the_checksum_does_not_depend_on_the_executor() -> None:
    checksums = set()
    for executor, num_trainers in [(name, 2) for name in EXECUTORS] + [
        ("shm", 1),
        ("shm", 3),
        ("local", 1),
        ("ipc", 3),
    ]:
        with bench_of(executor, num_trainers=num_trainers, num_rollouts=1) as bench:
            checksums.add(bench.manager.push(1).checksum)
    assert len(checksums) == 1


def test_weights_are_cast_to_the_engines_dtype(executor: str) -> None:
    with bench_of(executor, dtype=torch.bfloat16) as bench:
        report = bench.manager.push(1)
        assert_serves(bench, 0, 1, torch.bfloat16)
        assert report.num_bytes == sum(p.numel() * 2 for p in tiny_model(0).parameters()) * bench.rollouts.world_size
        assert all(check.equal for check in bench.manager.validate())


def test_validation_writes_what_it_compared(executor: str, tmp_path: Path) -> None:
    with bench_of(executor) as bench:
        bench.manager.report_dir = tmp_path / "reports"
        bench.manager.push(3)
        checks = bench.manager.validate()
        names = sorted(dict(tiny_model(0).named_parameters()))
        assert [check.name for check in checks] == names
        report = json.loads((tmp_path / "reports" / "weights_v3.json").read_text())
        assert report["equal"] is True
        assert [entry["name"] for entry in report["tensors"]] == names
        bench.trainers.all("train", 1)
        with pytest.raises(WeightTransferError, match="tensors differ"):
            bench.manager.validate()
        report = json.loads((tmp_path / "reports" / "weights_v3.json").read_text())
        assert (report["equal"], "model.embed_tokens.weight" in report["unequal"]) == (False, True)


def test_engines_serve_nothing_before_the_first_push(executor: str) -> None:
    with bench_of(executor) as bench, pytest.raises(WeightTransferError, match="quarantine"):
        bench.rollouts.all("complete")


def test_a_trainer_that_raises_is_healed_by_the_next_push(executor: str) -> None:
    with bench_of(executor) as bench:
        bench.manager.push(1)
        bench.trainers.all("train", 1)
        bench.trainers.execute_rank_async(1, "arm", "raise").get(scaled_s(5))
        with pytest.raises(RuntimeError, match="optimizer is in the way") as error:
            bench.manager.push(2)
        assert "push of version 2" in str(error.value.__notes__)
        for health in bench.rollouts.all("health"):
            assert health["quarantined"] or health["version"] == (2 if executor == "local" else 1)
        bench.trainers.execute_rank_async(1, "arm", "nothing").get(scaled_s(5))
        bench.manager.push(3)
        assert_serves(bench, 1, 3)


def test_a_trainer_that_hangs_fails_the_push_at_its_deadline(executor: str) -> None:
    with bench_of(executor) as bench:
        bench.manager.push(1)
        bench.trainers.execute_rank_async(0, "arm", "hang").get(scaled_s(5))
        bench.manager.deadline_s = 0.5
        started_s = time.monotonic()
        with pytest.raises(DeadlineError):
            bench.manager.push(2)
        assert time.monotonic() - started_s < scaled_s(20)


def test_a_trainer_killed_while_it_sends_leaves_whole_engines_and_no_memory() -> None:
    with bench_of("shm") as bench:
        bench.manager.push(1)
        assert [*bench.trainers.all("maps"), *bench.rollouts.all("maps")] == [1, 1, 2, 2]
        bench.trainers.execute_rank_async(1, "arm", "die").get(scaled_s(5))
        with pytest.raises(ConnectionError, match="trainer rank 1 is dead"):
            bench.manager.push(2)
        with pytest.raises(WeightTransferError, match="no longer exports weight version 1: push again"):
            bench.manager.restore(0)
        assert_serves(bench, 0, 1)
        bench.trainers.workers[1].start()
        bench.manager.connect()
        assert [*bench.trainers.all("maps"), *bench.rollouts.all("maps")] == [1, 1, 0, 0]
        bench.manager.push(3)
        assert [*bench.trainers.all("maps"), *bench.rollouts.all("maps")] == [1, 1, 2, 2]
        assert_serves(bench, 0, 3)
        bench.manager.close()
        assert [*bench.trainers.all("maps"), *bench.rollouts.all("maps")] == [0] * 4
    assert not list(Path("/dev/shm").glob("*rlsys*"))


def test_a_restarted_engine_is_restored_without_the_trainer() -> None:
    with bench_of("shm") as bench:
        with pytest.raises(WeightTransferError, match="before the first push"):
            bench.manager.restore(0)
        bench.manager.push(4)
        bench.trainers.all("train", 1)
        bench.trainers.all("arm", "raise")
        bench.rollouts.workers[1].kill()
        bench.rollouts.workers[1].start()
        bench.manager.restore(1)
        assert_serves(bench, 0, 4)


def test_no_rank_keeps_memory_that_is_freed_between_two_pushes() -> None:
    with ExitStack() as stack:
        bench = stack.enter_context(bench_of("ipc"))
        manager = ShardingManager(bench.trainers, bench.rollouts, executor="ipc", offloads=True)
        stack.callback(manager.close)
        manager.connect()
        for version, seed in ((1, 1), (2, 0)):
            manager.push(version)
            assert bench.rollouts.all("maps", "/torch_") == [0, 0]
            assert min(bench.trainers.all("maps", "/torch_")) > 0
            bench.trainers.all("train", seed)
            assert bench.trainers.all("maps", "/torch_") == [0, 0]
        assert_serves(bench, 1, 2)
        with pytest.raises(WeightTransferError, match="no longer exports weight version 2: push again"):
            manager.restore(0)


class OneRank(PipeGroup):
    """One of the workers of a group."""

    def __init__(self, group: PipeGroup, rank: int) -> None:
        self.workers = [group.workers[rank]]


def joined_again(bench: Bench) -> tuple[OneRank, OneRank]:
    """The engine that serves, and another one in a new process; the trainer is busy with other weights."""
    bench.trainers.all("train", 1)
    bench.trainers.all("arm", "raise")
    bench.rollouts.workers[1].kill()
    bench.rollouts.workers[1].start()
    return OneRank(bench.rollouts, 0), OneRank(bench.rollouts, 1)


def assert_left(*sides: OneRank) -> None:
    for side in sides:
        with pytest.raises(WeightTransferError, match="has not joined a weight transfer"):
            side.all("weight_step", "release")


@pytest.mark.parametrize("executor", ["shm", "ipc over hosts"])
def test_an_engine_that_joins_gets_the_weights_of_one_that_serves(executor: str) -> None:
    with bench_of(executor) as bench:
        with pytest.raises(WeightTransferError, match="before the first push"):
            bench.manager.copy(OneRank(bench.rollouts, 0), OneRank(bench.rollouts, 1))
        bench.manager.push(4)
        bench.manager.validate()
        bench.manager.copy(*joined_again(bench))
        assert_serves(bench, 0, 4)
        bench.trainers.all("arm", "nothing")
        bench.manager.connect()
        bench.manager.push(5)
        assert_serves(bench, 1, 5)


def test_weights_that_changed_since_they_were_validated_are_not_taken() -> None:
    with bench_of("shm") as bench:
        bench.manager.push(4)
        bench.manager.validate()
        peer, newcomer = joined_again(bench)
        peer.all("damage")
        with pytest.raises(WeightTransferError, match=r"1 tensors changed since .*'model\.norm\.weight'"):
            bench.manager.copy(peer, newcomer)
        assert_left(peer, newcomer)
        peer.all("damage", -1.0)
        bench.manager.copy(peer, newcomer)
        assert_serves(bench, 0, 4)


@pytest.mark.parametrize("executor", ["shm", "ipc over hosts"])
def test_an_engine_that_is_lost_while_it_joins_leaves_the_other_serving(executor: str) -> None:
    with bench_of(executor, deadline_s=8.0) as bench:
        bench.manager.push(1)
        peer, newcomer = joined_again(bench)
        newcomer.all("kill_in_update", 0)
        with pytest.raises((ConnectionError, WeightTransferError)) as raised:
            bench.manager.copy(peer, newcomer)
        assert "push of version 1" in str(raised.value.__notes__)
        assert serves_one_whole_version(bench, 0)
        assert_left(peer)
        newcomer.workers[0].kill()
        newcomer.workers[0].start()
        bench.manager.copy(peer, newcomer)
        assert_serves(bench, 0, 1)
        bench.trainers.all("arm", "nothing")
        bench.manager.connect()
        bench.manager.push(2)
        assert_serves(bench, 1, 2)


def test_an_engine_that_fails_while_it_joins_is_left_by_the_one_that_serves() -> None:
    with bench_of("shm", deadline_s=8.0) as bench:
        bench.manager.push(1)
        peer, newcomer = joined_again(bench)
        newcomer.all("raise_in_update", "out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            bench.manager.copy(peer, newcomer)
        assert_left(peer, newcomer)
        assert serves_one_whole_version(bench, 0)
        newcomer.all("kill_in_update", -1)
        bench.manager.copy(peer, newcomer)
        assert_serves(bench, 0, 1)


def test_an_engine_that_does_not_send_is_named_at_the_deadline() -> None:
    with bench_of("shm", deadline_s=2.0) as bench:
        bench.manager.push(1)
        peer, newcomer = joined_again(bench)
        os.kill(peer.workers[0].process.pid or 0, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match="rollout rank 0") as raised:
            bench.manager.copy(peer, newcomer)
        assert "connect" in str(raised.value.__notes__)


def serves_one_whole_version(bench: Bench, rank: int) -> bool:
    """Whether an engine serves; if so, its tokens are of one whole version and stamped as such."""
    if bench.rollouts.execute_rank_async(rank, "health").get(scaled_s(10))["quarantined"]:
        with pytest.raises(WeightTransferError, match="quarantine"):
            bench.rollouts.execute_rank_async(rank, "complete").get(scaled_s(10))
        return False
    tokens, versions = bench.rollouts.execute_rank_async(rank, "complete").get(scaled_s(10))
    assert (tokens, set(versions)) in [(expected_tokens(0), {1}), (expected_tokens(1), {2})]
    return True


@pytest.mark.parametrize("executor", REMOTE)
@pytest.mark.parametrize("victim", ["trainer", "trainer in the update", "rollout"])
def test_a_process_killed_during_a_push_leaves_no_mixed_weights(executor: str, victim: str) -> None:
    with bench_of(executor, deadline_s=8.0) as bench:
        bench.manager.push(1)
        bench.trainers.all("train", 1)
        died, kept = (bench.trainers.workers[1], [0, 1]) if "trainer" in victim else (bench.rollouts.workers[1], [0])
        if victim == "trainer":
            bench.trainers.execute_rank_async(1, "arm", "die").get(scaled_s(5))
        elif victim == "rollout":
            bench.rollouts.execute_rank_async(1, "kill_in_update", 0).get(scaled_s(5))
        else:
            bench.rollouts.execute_rank_async(0, "kill_in_update", died.process.pid).get(scaled_s(5))
        notes = None
        try:
            bench.manager.push(2)
        except (ConnectionError, WeightTransferError, DeadlineError) as error:
            notes = str(error.__notes__)
        served = [serves_one_whole_version(bench, rank) for rank in kept]
        if notes is None:
            assert all(served)
            assert victim == "trainer in the update"
            assert executor not in ("ipc over hosts", "gather")
        else:
            assert "push of version 2" in notes
        bench.rollouts.execute_rank_async(0, "kill_in_update", -1).get(scaled_s(10))
        died.kill()
        died.start()
        bench.trainers.all("train", 1)
        bench.manager.connect()
        bench.manager.push(3)
        assert_serves(bench, 1, 3)


@pytest.mark.timeout(120)  # the deadlines are longer
@pytest.mark.parametrize("side", ["trainers", "rollouts"])
def test_ranks_do_not_wait_for_one_that_died_before_it_joined_them(side: str) -> None:
    with bench_of("nccl", deadline_s=600.0) as bench:
        died = getattr(bench, side).workers[1]
        os.kill(died.process.pid, signal.SIGSTOP)
        Timer(1.0, died.process.kill).start()
        with pytest.raises(ConnectionError, match=f"{died.name} is dead"):
            bench.manager.push(1)
        died.kill()
        died.start()
        bench.manager.connect()
        bench.manager.push(1)
        assert_serves(bench, 0, 1)


def test_a_trainer_that_stops_between_hosts_is_named_and_the_next_push_heals() -> None:
    with bench_of("ipc over hosts", deadline_s=2.0) as bench:
        stopped = bench.trainers.workers[1].process.pid
        bench.rollouts.execute_rank_async(0, "kill_in_update", stopped, signal.SIGSTOP).get(scaled_s(5))
        with pytest.raises(DeadlineError, match="trainer rank 1 did not answer") as error:
            bench.manager.push(1)
        assert "in round 1 of" in str(error.value.__notes__)
        os.kill(stopped, signal.SIGCONT)
        bench.trainers.execute_rank_async(1, "maps").get(scaled_s(20))  # once it has missed its peer
        bench.rollouts.execute_rank_async(0, "kill_in_update", -1).get(scaled_s(5))
        bench.manager.deadline_s = scaled_s(20)
        bench.manager.push(2)
        assert_serves(bench, 0, 2)


def test_a_version_directory_is_a_loadable_model(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = remote_bench(stack, 2, 1, torch.bfloat16, 20.0)
        (tmp_path / "model").mkdir()
        tiny_model(0).config.save_pretrained(tmp_path / "model")
        manager = ShardingManager(
            bench.trainers,
            bench.rollouts,
            executor="disk",
            disk_root=tmp_path / "weights",
            disk_assets=tmp_path / "model",
        )
        manager.connect()
        for version in range(4):
            manager.push(version)
        assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v2", "v3"]
        loaded = Qwen2ForCausalLM.from_pretrained(tmp_path / "weights" / "v3", dtype=torch.bfloat16)
        wanted = dict(tiny_model(0, torch.bfloat16).named_parameters())
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.named_parameters())
        file = tmp_path / "weights" / "v3" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        with pytest.raises(WeightTransferError, match="the received values differ"):
            bench.rollouts.execute_rank_async(0, "receive_weights", 3).get(scaled_s(5))
        with pytest.raises(WeightTransferError, match="holds no complete weights"):
            bench.rollouts.execute_rank_async(0, "receive_weights", 9).get(scaled_s(5))
        with pytest.raises(WeightTransferError, match="quarantine"):
            bench.rollouts.all("complete")


def test_a_lost_engine_is_restored_or_needs_another_push() -> None:
    with bench_of("ipc") as bench:
        bench.manager.push(4)
        bench.rollouts.workers[1].kill()
        bench.rollouts.workers[1].start()
        bench.manager.restore(1)
        assert_serves(bench, 0, 4)
        bench.trainers.all("step_in_place")
        with pytest.raises(WeightTransferError, match="the received values differ"):
            bench.manager.restore(1)
    with bench_of("gather") as bench:
        bench.manager.push(4)
        with pytest.raises(WeightTransferError, match="push again"):
            bench.manager.restore(1)


def test_the_executor_is_chosen_by_host_and_device() -> None:
    def at(host: str, device: str) -> WeightLayout:
        return WeightLayout(0, host, (), {}, {}, device=device)

    assert choose([at("a", "cuda")], [at("a", "cuda")]) == "ipc"
    assert choose([at("a", "cpu")], [at("a", "cuda")]) == choose([at("a", "cpu")], [at("a", "cpu")]) == "shm"
    assert choose([at("a", "cuda")], [at("b", "cuda")]) == "nccl"
    assert choose([at("a", "cuda"), at("b", "cuda")], [at("b", "cuda")]) == "ipc"
    with pytest.raises(ValueError, match="disk_root"):
        ShardingManager(PipeGroup("a", []), PipeGroup("b", []), executor="disk")
    with pytest.raises(ValueError, match="not a step"):
        WeightSender(ShardedTrainer(0, 1)).weight_step("close")  # pyrefly: ignore


def test_damaged_memory_is_found_and_healed() -> None:
    with bench_of("shm") as bench:
        bench.manager.push(1)
        bench.rollouts.execute_rank_async(1, "damage_in_update").get(scaled_s(5))
        with pytest.raises(WeightTransferError, match=r"'model\.norm\.weight': the received values differ"):
            bench.manager.push(2)
        with pytest.raises(WeightTransferError, match="quarantine"):
            bench.rollouts.execute_rank_async(1, "complete").get(scaled_s(5))
        bench.rollouts.execute_rank_async(1, "kill_in_update", -1).get(scaled_s(5))
        bench.manager.push(3)
        assert_serves(bench, 0, 3)


def test_layouts_that_do_not_fit_are_refused_at_connect() -> None:
    class Misfit(RolloutWorker):
        change: Callable[[WeightLayout], WeightLayout]

        def weight_layout(self) -> WeightLayout:
            return type(self).change(super().weight_layout())

    def fails(change: Callable[[WeightLayout], WeightLayout], message: str) -> None:
        kind = type("Changed", (Misfit,), {"change": staticmethod(change)})
        with ExitStack() as stack:
            bench = remote_bench(stack, 1, 0, torch.float32, 10.0)
            misfits = PipeGroup("rollout", [lambda: kind(0, torch.float32)])
            stack.callback(misfits.close)
            with pytest.raises(WeightTransferError, match=message):
                ShardingManager(bench.trainers, misfits, executor="shm").connect()

    fails(lambda layout: replace(layout, host="there"), r"one host only.*\['here', 'there'\]")
    fails(lambda layout: replace(layout, full_shapes={**layout.full_shapes, "new": (2,)}), "no rollout rank holds.*new")
    fails(lambda layout: replace(layout, shards=layout.shards[1:]), "no rollout rank holds")

    with pytest.raises(WeightTransferError, match="connect"):
        ShardingManager(PipeGroup("a", []), PipeGroup("b", [])).push(1)
