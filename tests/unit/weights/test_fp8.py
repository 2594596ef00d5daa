"""Weights pushed as FP8: vLLM's arithmetic, blocks that shards cut, engines with fused matrices and their scales."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.models.quantized import SCALE, scale_shape
from rlsys.rollout.engine_weights import EngineWeights
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.endpoints import WeightReceiver, WeightSender
from rlsys.weights.executors.in_process import LocalReshard
from rlsys.weights.fp8 import Fp8Weights, MatrixBox, float8_shapes, prepared_quantiser
from rlsys.weights.layout import shard_view, view_of, whole_box
from rlsys.weights.plan import make_plan
from rlsys.weights.sharding_manager import ExecutorName, ShardingManager
from tests.ranks import run_ranks
from tests.timing import scaled_s
from tests.unit.weights.test_executors import ThreadGroup
from workers.colocated import learn_engine_layout

SHAPES = {"embed": (50, 200), "q": (256, 200), "k": (128, 200), "v": (150, 200), "norm": (200,), "o": (200, 534)}
MATRICES = ("q", "k", "v", "o")
BLOCKS, SIZES = pytest.mark.parametrize("block", [64, 128]), st.sampled_from([64, 128])


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 10 ** (seed % 3) for name, shape in SHAPES.items()}


def quantised(matrix: Tensor, block: int) -> tuple[Tensor, Tensor]:
    scales = torch.zeros(scale_shape(matrix.shape, block))
    elements = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    prepared_quantiser([MatrixBox(matrix, whole_box("", matrix.shape), matrix.shape, scales, elements)], scales)(False)
    return elements, scales


def quantised_model(full: Mapping[str, Tensor], block: int) -> dict[str, Tensor]:
    parts = {name: quantised(tensor, block) for name, tensor in full.items() if name in MATRICES}
    plain = {name: tensor for name, tensor in full.items() if name not in MATRICES}
    return plain | {n: each[0] for n, each in parts.items()} | {n + SCALE: each[1] for n, each in parts.items()}


class Trainer:
    """A trainer rank with rows of every tensor, as FSDP cuts them."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.take(model(0))

    def take(self, full: Mapping[str, Tensor]) -> None:
        self.full, self.tensors, self.shards = full, dict[str, Tensor](), list[Shard]()
        for name, tensor in full.items():
            start, stop = (min(len(tensor), rank * -(-len(tensor) // self.size)) for rank in (self.rank, self.rank + 1))
            self.tensors[name], zeros = tensor[start:stop].clone(), (0,) * tensor.ndim
            if start < stop:
                self.shards.append(Shard(Box(name, (start, *zeros[1:]), tuple(self.tensors[name].shape)), name, zeros))

    def weight_layout(self) -> WeightLayout:
        return WeightLayout(self.rank, "here", tuple(self.shards), SHAPES, dict.fromkeys(SHAPES, "float32"))

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        yield from ([item] for item in self.full.items())


class Engine:
    """An engine with a fused matrix of which only the loader is known."""

    def __init__(self, block: int) -> None:
        fp8, self.block = torch.float8_e4m3fn, block
        self.parameters = {
            "tok.weight": torch.zeros(64, 200, dtype=torch.bfloat16),
            "qkv.weight": torch.zeros(534, 200, dtype=fp8),
            "qkv.scale": torch.zeros(scale_shape((534, 200), block)),
            "out.weight": torch.zeros(200, 534, dtype=fp8),
            "out.scale": torch.zeros(scale_shape((200, 534), block)),
            "norm.weight": torch.zeros(200, dtype=torch.bfloat16),
        }
        expected = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in SHAPES.items()}
        self.config = SimpleNamespace(quantization_config={"weight_block_size": [block, block]})
        self.weights = EngineWeights(expected, {}, lambda: self, lambda: None)
        self.version = -1
        learn_engine_layout(self.weights, keep=False)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.parameters.items()

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        first = {"q": 0, "k": 256, "v": 384}
        for name, tensor in tensors:
            stem, kind = name.removesuffix(SCALE), "scale" if name.endswith(SCALE) else "weight"
            if stem in first:
                start = first[stem] // (self.block if kind == "scale" else 1)
                self.parameters[f"qkv.{kind}"][start : start + len(tensor)].copy_(tensor)
            else:
                target = self.parameters[{"embed": "tok", "o": "out", "norm": "norm"}[stem] + f".{kind}"]
                target[: len(tensor)].copy_(tensor)

    def weight_layout(self) -> WeightLayout:
        return self.weights.layout(rank=0, host="here")

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.weights.tensors()

    def load(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self.weights.load(bucket)

    def begin_update(self) -> None: ...

    def finish_update(self, version: int) -> None:
        self.version = version


def assert_serves(engine: Engine, full: Mapping[str, Tensor]) -> None:
    held = {name: tensor.clone() for name, tensor in engine.parameters.items()}
    engine.load_weights(iter(quantised_model(full, engine.block).items()))
    for name, tensor in engine.parameters.items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


@BLOCKS
def test_the_loader_shows_which_matrices_are_float8(block: int) -> None:
    layout = Engine(block).weight_layout()
    kinds = dict.fromkeys(("embed", "norm"), "bfloat16") | dict.fromkeys(MATRICES, "float8_e4m3fn")
    assert layout.dtypes == kinds | {name + SCALE: "float32" for name in MATRICES}
    assert layout.full_shapes == SHAPES | {name + SCALE: scale_shape(SHAPES[name], block) for name in MATRICES}
    assert layout.loader == ()


def pair_of(trainer: Trainer, engine: Engine) -> tuple[ThreadGroup, ThreadGroup]:
    return ThreadGroup([WeightSender(trainer)]), ThreadGroup([WeightReceiver(engine)])  # pyrefly: ignore


@BLOCKS
@pytest.mark.parametrize("executor", ["shm", "ipc", "nccl", "disk", "gather"])
def test_every_executor_brings_elements_and_scales(executor: ExecutorName, block: int, tmp_path: Path) -> None:
    trainer, engine = Trainer(), Engine(block)
    ends = pair_of(trainer, engine)
    disk = tmp_path if executor == "disk" else None
    manager = ShardingManager(*ends, executor=executor, disk_root=disk, deadline_s=scaled_s(60.0))
    manager.connect()
    for version in range(3):
        trainer.take(full := model(version))
        manager.push(version)
        if executor != "gather":
            assert len(manager.validate()) == len(SHAPES) + len(MATRICES)
        assert engine.version == version
        assert_serves(engine, full)
    manager.close()


@BLOCKS
def test_an_engine_that_joins_holds_the_elements_and_scales_of_one_that_serves(block: int) -> None:
    trainer, engine, late = Trainer(), Engine(block), Engine(block)
    trainers, peer = pair_of(trainer, engine)
    _, newcomer = pair_of(trainer, late)
    manager = ShardingManager(trainers, peer, executor="shm", deadline_s=scaled_s(60.0))
    manager.connect()
    for version in range(2):
        trainer.take(full := model(version))
        manager.push(version)
        manager.validate()
        trainer.take(model(version + 1))  # the trainer continues
        manager.copy(peer, newcomer)
        assert late.version == version
        assert_serves(late, full)
        manager.connect()
    for name in ("qkv.scale", "out.weight"):
        engine.parameters[name].view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(WeightTransferError, match=r"1 tensors changed since they were pushed"):
            manager.copy(peer, newcomer)
        engine.parameters[name].view(torch.uint8)[0, 0] ^= 1
    manager.copy(peer, newcomer)
    assert_serves(late, full)


def test_an_engine_without_fp8_does_not_send_to_one_with_it() -> None:
    trainer, late = Trainer(), Engine(128)
    trainers, newcomer = pair_of(trainer, late)
    wide = ThreadGroup([WeightReceiver(trainer)])  # pyrefly: ignore
    manager = ShardingManager(trainers, newcomer, executor="shm", deadline_s=scaled_s(60.0))
    manager.connect()
    manager.push(0)
    with pytest.raises(WeightTransferError, match="_scale_inv"):
        manager.copy(wide, newcomer)


@pytest.mark.parametrize("block", [64, 128])
def test_an_engine_beside_the_trainer_holds_elements_and_scales(block: int) -> None:
    trainer, engine = Trainer(), Engine(block)
    local = LocalReshard(trainer, engine)  # pyrefly: ignore
    for version in range(2):
        trainer.take(full := model(version))
        local.push(version)
        assert_serves(engine, full)
    with pytest.raises(WeightTransferError, match="has not received weight version 5"):
        local.finish(5, np.empty(0, np.uint64))


@BLOCKS
def test_full_tensors_are_sent_as_float8_elements_and_scales(block: int) -> None:
    trainer = Trainer()
    trainer.take(full := model(1))
    weights = Fp8Weights(trainer, float8_shapes([Engine(block).weight_layout()]))  # pyrefly: ignore
    sent = dict(part for bucket in weights.weights(1 << 20) for part in bucket)
    expected = quantised_model(full, block)
    assert set(sent) == set(expected)
    for name in MATRICES:
        assert (sent[name].dtype, sent[name + SCALE].dtype) == (torch.float8_e4m3fn, torch.float32)
        assert torch.equal(sent[name].view(torch.uint8), expected[name].view(torch.uint8))
        torch.testing.assert_close(sent[name + SCALE], expected[name + SCALE], rtol=0, atol=0)


def of_rank(engines: list[WeightLayout]) -> list[tuple[WeightLayout, dict[str, Tensor]]]:
    trainer, given = Trainer(dist.get_rank(), dist.get_world_size()), []
    trainer.take(model(1))
    for engine in engines:
        weights = Fp8Weights(trainer, float8_shapes([engine]))  # pyrefly: ignore
        tensors = {name: tensor.view(torch.uint8) for name, tensor in weights.local_tensors().items()}
        given.append((weights.weight_layout(), tensors))
    return given


def test_shards_that_cut_blocks_give_the_bits_of_the_whole() -> None:
    engines = [Engine(block) for block in (64, 128)]
    by_rank = run_ranks(3, of_rank, [engine.weight_layout() for engine in engines])
    for engine, ranks in zip(engines, zip(*by_rank, strict=True), strict=True):
        assert_parts_of(quantised_model(model(1), engine.block), ranks, engine)


def assert_parts_of(whole: Mapping[str, Tensor], ranks: Sequence[Any], engine: Engine) -> None:
    for layout, tensors in ranks:
        for shard in layout.shards:
            if shard.box.tensor in MATRICES or shard.box.tensor.endswith(SCALE):
                held = {shard.local: tensors[shard.local].view(whole[shard.box.tensor].dtype)}
                wanted = view_of(whole[shard.box.tensor], shard.box.start, shard.box.shape).contiguous()
                assert torch.equal(shard_view(held, shard).view(torch.uint8), wanted.view(torch.uint8)), shard.box
    plan = make_plan([layout for layout, _ in ranks], [engine.weight_layout()])
    matrices = sum(2 * SHAPES[name][0] * SHAPES[name][1] for name in MATRICES)
    sent = sum(copy.num_bytes for copy in plan.copies if copy.tensor.removesuffix(SCALE) in MATRICES)
    assert sent < 0.51 * matrices


def by_hand(matrix: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """One block after the other."""
    scales = torch.empty([-(-size // block) for size in matrix.shape])
    elements = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = tuple(slice(at * block, at * block + block) for at in (row, column))
            values = matrix[part].to(torch.bfloat16).float()
            scales[row, column] = max(float(values.abs().max()), 1e-4)
            scales[row, column] /= 448.0
            elements[part] = (values * (1.0 / scales[row, column])).to(torch.float8_e4m3fn)
    return elements, scales


VALUES = st.sampled_from([0.0, -0.0, 1e-40, -3e-39, 1e-4, 1e-5, 0.3, -1.0, 448.0, 3e38, -3e38, float("inf")])


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    shape = draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    matrix = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-6, 6))
    for value in draw(st.lists(VALUES, max_size=6)):
        matrix[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1)) :: 3] = value
    return matrix.to(draw(st.sampled_from([torch.bfloat16, torch.float32])))


@settings(max_examples=40)
@given(matrices(), SIZES)
@example(torch.zeros(130, 129), 128)
@example(torch.full((5, 200), -1e-5), 64)
@example(torch.full((129, 1), 3e-39), 128)
@example(torch.full((64, 65), 2.0), 64)
def test_blocks_are_quantised_as_one_by_one(matrix: Tensor, block: int) -> None:
    for own, wanted in zip(quantised(matrix, block), by_hand(matrix, block), strict=True):
        assert torch.equal(own.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@settings(max_examples=60, deadline=None)
@given(matrices(), SIZES)
def test_the_arithmetic_is_that_of_vllm(matrix: Tensor, block: int) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("force_eager"):
        theirs = per_block_cast_to_fp8(matrix.to(torch.bfloat16), [block, block])
    for own, wanted in zip(quantised(matrix, block), theirs, strict=True):
        assert torch.equal(own.view(torch.uint8), wanted.view(torch.uint8))
