"""Muon, 8-bit AdamW and AdamW on the host: their arithmetic, and that a checkpoint continues them to the bit."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlsys.config.schema.model import OptimConfig, OverrideOptimizerConfig, ShardConfig
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.fsdp.optim import ShardedMuon, local_of
from rlsys.utils.errors import CheckpointError
from tests.engine_gradients import gradients
from tests.ranks import run_ranks
from tests.unit.engines.common import MODEL, nll, random_model, same, small_engine, small_rows, train, whole

WIDE = {**MODEL, "hidden_size": 64, "intermediate_size": 97, "vocab_size": 131}
"""Matrices of 4,096 elements and more, whose rows two ranks cannot share evenly."""
EVEN = {**WIDE, "intermediate_size": 194, "vocab_size": 262}
"""The same for two pairs of ranks that split them."""
OPTIMIZERS = {
    "AdamW": {},
    "Muon": {"optimizer": "Muon"},
    "AdamW8bit": {"optimizer": "AdamW8bit", "optimizer_impl": "bitsandbytes.optim"},
    "host": {"override_optimizer_config": OverrideOptimizerConfig(optimizer_cpu_offload=True)},
}
LR, DECAY = 1e-2, 0.1


def engine_with(kind: str, tp_size: int = 1) -> FSDPEngine:
    if kind == "AdamW8bit":
        pytest.importorskip("bitsandbytes")
    optim = OptimConfig(lr=LR, weight_decay=DECAY, **OPTIMIZERS[kind])
    shard = ShardConfig(seed=1, tensor_parallel_size=tp_size)
    return small_engine(random_model(EVEN if tp_size > 1 else WIDE), optim=optim, grad_clip=0.0, shard=shard)


def steps_of(kind: str, count: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Mean gradients of each step, and the weights before it; those after the last step at the end."""
    engine, steps = engine_with(kind), []
    for _ in range(count):
        rows = small_rows()
        engine.forward_backward(rows, nll)
        mean = {name: g.double() / engine._count for name, g in gradients(engine).items()}
        steps.append((mean, whole(engine)))
        engine.optim_step()
    return [*steps, ({}, whole(engine))]


def orthogonalised(matrix: Tensor) -> Tensor:
    """Five steps of the quintic iteration of Jordan et al., in float64."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.T


SHAPES = [(6, 9), (9, 5), (1, 8), (7, 7)]
"""Wide, tall, with fewer rows than ranks, and with rows that two ranks cannot share evenly."""


def muon_steps(matrices: list[Tensor], directions: list[list[Tensor]]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)])) for matrix in matrices]
    rows = [nn.Parameter(local_of(parameter)) for parameter in parameters]
    optimizer = ShardedMuon(dict(zip(rows, parameters, strict=True)), OptimConfig(lr=LR, weight_decay=DECAY))
    for gradients_of_step in directions:
        for local, gradient in zip(rows, gradients_of_step, strict=True):
            local.grad = local_of(distribute_tensor(gradient, mesh, [Shard(0)]))
        optimizer.step()
    return [parameter.detach().full_tensor() for parameter in parameters]


@pytest.mark.parametrize("world", [1, 2])
def test_muon_orthogonalises_the_momentum_of_whole_matrices(world: int) -> None:
    """Against the paper's iteration in float64; torch's is in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    matrices, *directions = ([torch.randn(s, generator=generator) for s in SHAPES] for _ in range(4))
    stepped = run_ranks(world, muon_steps, matrices, directions)
    for index, weight in enumerate(matrices):
        expected, momentum = weight.double(), torch.zeros(SHAPES[index]).double()
        for gradients_of_step in directions:
            gradient = gradients_of_step[index].double()
            momentum = 0.95 * momentum + 0.05 * gradient
            step = orthogonalised(0.05 * gradient + 0.95 * momentum) * 0.2 * max(SHAPES[index]) ** 0.5
            expected = expected * (1 - LR * DECAY) - LR * step
        moved = (expected - weight.double()).norm()
        assert all(float((rank[index].double() - expected).norm() / moved) < 0.03 for rank in stepped)
        assert all(torch.equal(rank[index], stepped[0][index]) for rank in stepped)


def test_muon_steps_the_matrices_of_layers_and_adamw_the_rest() -> None:
    first, (_, after) = run_ranks(1, steps_of, "Muon", 1)[0]
    names = run_ranks(1, momentum_names)[0]
    assert names == {name for name, g in first[0].items() if name.startswith("model.layers.") and g.ndim == 2}
    for name in first[0].keys() - names:
        clear = first[0][name].abs() > 1e-5
        expected = first[1][name] * (1 - LR * DECAY) - LR * first[0][name].sign()
        torch.testing.assert_close(after[name][clear].double(), expected[clear].double(), rtol=0, atol=2e-5)


def muon_weights(tp_size: int) -> dict[str, Tensor]:
    engine = small_engine(
        random_model(EVEN),
        optim=OptimConfig(lr=LR, optimizer="Muon"),
        shard=ShardConfig(seed=1, tensor_parallel_size=tp_size),
    )
    before = whole(engine)
    train(engine)
    return {name: tensor - before[name] for name, tensor in whole(engine).items()}


@pytest.mark.slow
def test_muon_gathers_matrices_that_ranks_split_in_the_right_order() -> None:
    """Rounding turns null directions of the gradient; rows in another order would turn everything."""
    alone, *_ = run_ranks(1, muon_weights, 1)
    for split in run_ranks(4, muon_weights, 2):
        for name, change in alone.items():
            assert float((split[name] - change).norm() / change.norm()) < 0.2, name


def momentum_names() -> set[str]:
    moments = engine_with("Muon").optimizer.moments()
    return {name.partition(".")[2] for name in moments if name.startswith("momentum_buffer.")}


@pytest.mark.parametrize("world", [1, 2])
def test_eight_bit_adamw_begins_as_adamw_and_stays_near_it(world: int) -> None:
    pytest.importorskip("bitsandbytes")
    exact, rounded = (run_ranks(world, steps_of, kind, 6)[0] for kind in ("AdamW", "AdamW8bit"))
    for name in exact[0][1]:
        torch.testing.assert_close(rounded[1][1][name], exact[1][1][name], rtol=0, atol=2e-6)
        moved, apart = exact[-1][1][name] - exact[0][1][name], rounded[-1][1][name] - exact[-1][1][name]
        assert float(apart.norm() / moved.norm()) < 0.1, name
    large = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(exact[-1][1][large], rounded[-1][1][large])


def test_adamw_on_the_host_steps_like_adamw() -> None:
    on_device, on_host = (run_ranks(1, steps_of, kind, 2)[0] for kind in ("AdamW", "host"))
    assert same(on_host[-1][1], on_device[-1][1])


def offload(engine: FSDPEngine) -> int:
    """As `move` does on a GPU; returns the bytes that stay."""
    tensors = [tensor for part in ("params", "optimizer") for tensor in engine._tensors_of(part)]
    for part in ("params", "optimizer"):
        engine._offload.offload(part, engine._tensors_of(part))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def of_a_frozen_engine() -> tuple[int, int, int]:
    engine = small_engine(random_model(WIDE), optim=None)
    held, *none = (len(engine._tensors_of(part)) for part in ("params", "optimizer", "grads"))
    return held, *none


def test_an_engine_without_an_optimizer_has_only_parameters_to_offload() -> None:
    ((params, moments, grads),) = run_ranks(1, of_a_frozen_engine)
    assert params > 0
    assert moments == grads == 0


def continued(kind: str, path: Path, tp_size: int = 1, away: bool = False) -> tuple[bool, bool, set[str]]:
    engine, again = engine_with(kind, tp_size), engine_with(kind, tp_size)
    for _ in range(2):
        train(engine)
    if away:
        assert offload(engine) == offload(again) == 0
    engine.save(path, "resume")
    again.load(path)
    if away:
        for one in (engine, again):
            assert offload(one) == 0, "the checkpoint leaves it where it was"
            one.move(("params", "optimizer"), "cuda")  # where it came from
    loaded = same(whole(engine), whole(again))
    for _ in range(2):
        train(engine)
        train(again)
    dtypes = {str(moment.dtype) for moment in engine.optimizer.moments().values()}
    return loaded, same(whole(engine), whole(again)), dtypes


@pytest.mark.parametrize(
    ("kind", "tp_size", "away"),
    [
        *product(["Muon", "AdamW8bit", "host"], [1], [False]),
        *product(["Muon", "AdamW8bit", "AdamW"], [1], [True]),
        pytest.param("AdamW8bit", 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_continues_each_optimizer_to_the_bit(kind: str, tp_size: int, away: bool, tmp_path: Path) -> None:
    if kind == "AdamW8bit":
        pytest.importorskip("bitsandbytes")
    for loaded, equal, dtypes in run_ranks(2 * tp_size, continued, kind, tmp_path / "step_1", tp_size, away):
        assert loaded
        assert equal
        assert ("torch.uint8" in dtypes) == (kind == "AdamW8bit")


def refused(path: Path) -> dict[str, str]:
    messages = {}
    for kind in ("AdamW", "AdamW8bit"):
        engine = engine_with(kind)
        before: Any = whole(engine)
        with pytest.raises(CheckpointError) as error:
            engine.load(path)
        messages[kind] = str(error.value)
        assert same(before, whole(engine))
    return messages


def test_the_state_of_another_optimizer_or_of_other_shards_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run_ranks(2, continued, "AdamW8bit", tmp_path / "step_1")
    (messages,) = run_ranks(1, refused, tmp_path / "step_1")
    assert "AdamW8bit sharded over 2, and this run's optimizer is AdamW:" in messages["AdamW"]
    assert "load_contents=[model,extra]" in messages["AdamW"]
    assert "and this run's optimizer is AdamW8bit sharded over 1:" in messages["AdamW8bit"]
