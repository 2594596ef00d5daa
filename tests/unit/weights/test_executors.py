"""Every executor from Megatron shards into engines with a learned layout and one tensor left to their loader."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.models.megatron.family import family_of
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.endpoints import WeightReceiver, WeightSender
from rlsys.weights.executors.nccl import plan_rounds
from rlsys.weights.layout import dtype_of, shard_view, view_of
from rlsys.weights.learn import learn_layout
from rlsys.weights.plan import make_plan
from rlsys.weights.sharding_manager import ExecutorName, MegatronSGLangShardingManager
from scripts.weight_layouts import EngineSizes, engine_layouts, local_shapes, megatron_layouts
from tests.timing import scaled_s
from tests.unit.models.megatron_families import tiny

CONFIG = {**tiny.CONFIGS["qwen3-moe"], "num_hidden_layers": 2, "mlp_only_layers": [], "num_experts": 4}
FAMILY = family_of(CONFIG)
SHAPES = FAMILY.hf_shapes(CONFIG)
LOADER_ONLY = "model.layers.1.self_attn.k_norm.weight"


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Trainer:
    """A rank of Megatron in float32."""

    def __init__(self, layout: WeightLayout) -> None:
        self.layout = layout
        self.tensors = {name: torch.zeros(shape) for name, shape in local_shapes(layout).items()}

    def take(self, full: Mapping[str, Tensor]) -> None:
        self.full = full
        for shard in self.layout.shards:
            box = shard.box
            shard_view(self.tensors, shard).copy_(view_of(full[box.tensor], box.start, box.shape))

    def weight_layout(self) -> WeightLayout:
        return self.layout

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        yield from ([item] for item in self.full.items())


class Engine:
    """A rank of an engine in bfloat16 with an unknown layout, whose loader doubles one tensor."""

    def __init__(self, secret: WeightLayout) -> None:
        self.secret = secret
        dtype = dtype_of("bfloat16")
        self.tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in local_shapes(secret).items()}
        self.version, self.quarantined, self.loads = -1, True, 0
        dtypes = dict.fromkeys(SHAPES, "bfloat16")
        self.learned = learn_layout(self.load, lambda: self.tensors, SHAPES, dtypes)

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.loads += 1
        for name, full in bucket:
            for shard in self.secret.shards:
                if shard.box.tensor == name:
                    part = view_of(full, shard.box.start, shard.box.shape)
                    shard_view(self.tensors, shard).copy_(part * 2 if name == LOADER_ONLY else part)

    def weight_layout(self) -> WeightLayout:
        return replace(self.learned.layout, rank=self.secret.rank, host=self.secret.host)

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.learned.tensors(self.tensors)

    def begin_update(self) -> None:
        self.quarantined = True

    def finish_update(self, version: int) -> None:
        self.version, self.quarantined = version, False


class ThreadGroup:
    """Ranks in threads of this process, called as a WorkerGroup is."""

    def __init__(self, ends: Sequence[Any]) -> None:
        self.ends = ends
        self.threads = [ThreadPoolExecutor(1) for _ in ends]

    @property
    def world_size(self) -> int:
        return len(self.ends)

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> Any:
        future: Future = self.threads[rank].submit(getattr(self.ends[rank], method), *args)
        return type("Answer", (), {"get": staticmethod(future.result)})

    def execute_all_async(self, method: str, *args: Any) -> list[Any]:
        return [self.execute_rank_async(rank, method, *args) for rank in range(self.world_size)]


@pytest.fixture
def sides() -> tuple[list[Trainer], list[Engine]]:
    sizes = ParallelSizes(tp=2, pp=2, ep=2, etp=1)
    layouts = megatron_layouts(CONFIG, sizes, dtype="float32", ranks_per_host=99)
    trainers = [Trainer(replace(layout, host="here")) for layout in layouts]
    secrets = engine_layouts(SHAPES, EngineSizes(tp_size=2, vocab_multiple=8), num_kv_heads=4)
    return trainers, [Engine(replace(secret, host="here")) for secret in secrets]


def over_two_hosts(trainers: Sequence[Trainer], engines: Sequence[Engine]) -> None:
    for trainer in trainers[2:]:
        trainer.layout = replace(trainer.layout, host="there")
    engines[1].secret = replace(engines[1].secret, host="there")


@pytest.mark.parametrize("executor", ["shm", "ipc", "nccl", "disk", "gather"])
def test_megatron_to_a_learned_engine(
    executor: ExecutorName, sides: tuple[list[Trainer], list[Engine]], tmp_path: Path
) -> None:
    trainers, engines = sides
    if executor == "gather":
        over_two_hosts(trainers, engines)
    assert {engine.learned.layout.loader for engine in engines} == {(LOADER_ONLY,)}
    senders = ThreadGroup([WeightSender(trainer) for trainer in trainers])  # pyrefly: ignore
    receivers = ThreadGroup([WeightReceiver(engine) for engine in engines])  # pyrefly: ignore
    manager = MegatronSGLangShardingManager(
        senders,
        receivers,
        executor=executor,
        deadline_s=scaled_s(30.0),
        disk_root=tmp_path if executor == "disk" else None,
    )
    checksums = []
    for trainer in trainers:
        trainer.take(model(0))
    manager.connect()
    for version, seed in ((1, 0), (2, 1), (3, 0)):
        for trainer in trainers:
            trainer.take(model(seed))
        checksums.append(manager.push(version).checksum)
        for engine in engines:
            held = {name: tensor.clone() for name, tensor in engine.tensors.items()}
            assert (engine.version, engine.quarantined) == (version, False)
            engine.load([(name, tensor.bfloat16()) for name, tensor in model(seed).items()])
            assert all(torch.equal(held[name], tensor) for name, tensor in engine.tensors.items())
    assert checksums[0] == checksums[2] != checksums[1]
    assert all(check.equal for check in manager.validate())
    manager.close()


def test_an_importer_frees_staging_for_a_loader_after_each_push(
    sides: tuple[list[Trainer], list[Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers, engines = sides
    staged = list[Any]()
    load = Engine.load

    def noted(engine: Engine, bucket: Sequence[tuple[str, Tensor]]) -> None:
        staged.extend(tensor.untyped_storage()._weak_ref() for _, tensor in bucket)
        load(engine, bucket)

    monkeypatch.setattr(Engine, "load", noted)
    ends = [ThreadGroup([*map(WeightSender, trainers)]), ThreadGroup([*map(WeightReceiver, engines)])]
    manager = MegatronSGLangShardingManager(*ends, executor="ipc", deadline_s=scaled_s(30.0))
    for trainer in trainers:
        trainer.take(model(0))
    manager.connect()
    for version in (1, 2):
        manager.push(version)
        assert len(staged) == version * len(engines)
        assert all(map(torch.UntypedStorage._expired, staged))
    manager.close()


def test_gathering_needs_a_trainer_rank_on_every_host(sides: tuple[list[Trainer], list[Engine]]) -> None:
    trainers, engines = sides
    engines[1].secret = replace(engines[1].secret, host="there")
    ends = [ThreadGroup([*map(WeightSender, trainers)]), ThreadGroup([*map(WeightReceiver, engines)])]
    manager = MegatronSGLangShardingManager(*ends, executor="gather", deadline_s=scaled_s(30.0))
    with pytest.raises(WeightTransferError, match=r"there is none on \['there'\]"):
        manager.connect()


def test_weights_changed_during_a_push_are_detected(sides: tuple[list[Trainer], list[Engine]]) -> None:
    trainers, engines = sides
    for trainer in trainers:
        trainer.take(model(0))
    senders = ThreadGroup([WeightSender(trainer) for trainer in trainers])  # pyrefly: ignore
    receivers = ThreadGroup([WeightReceiver(engine) for engine in engines])  # pyrefly: ignore
    manager = MegatronSGLangShardingManager(senders, receivers, executor="ipc", deadline_s=scaled_s(30.0))
    manager.connect()
    begin = engines[1].begin_update

    def step_meanwhile() -> None:
        begin()
        trainers[1].tensors["0.embedding.word_embeddings.weight"].add_(1.0)

    engines[1].begin_update = step_meanwhile  # pyrefly: ignore
    with pytest.raises(WeightTransferError, match=r"'model.embed_tokens.weight': the received values differ"):
        manager.push(1)
    assert [engine.quarantined for engine in engines] != [False, False]
    engines[1].begin_update = begin  # pyrefly: ignore
    manager.push(2)
    assert [engine.quarantined for engine in engines] == [False, False]


def test_messages_are_bounded_and_complete(sides: tuple[list[Trainer], list[Engine]]) -> None:
    trainers, engines = sides
    plan = make_plan([t.layout for t in trainers], [e.secret for e in engines])
    rounds = plan_rounds(plan.copies, staging_bytes=1 << 13)
    for messages in rounds:
        for side in (0, 1):
            for rank in {link[side] for link in messages}:
                staged = sum(c.num_bytes for link, m in messages.items() if link[side] == rank for c in m)
                assert staged <= 1 << 13
    copies = [copy for messages in rounds for message in messages.values() for copy in message]
    assert sum(copy.num_bytes for copy in copies) == sum(copy.num_bytes for copy in plan.copies)
    assert len(copies) > len(plan.copies)
    assert len(rounds) > 1
