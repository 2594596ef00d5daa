"""Gated delta layers of Megatron on CUDA with flash-linear-attention: Qwen3-Next and Qwen3.5 on one GPU and two."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from rlsys.models.megatron.parallel import ParallelSizes
from tests.contracts.train_engine import Case, one_step, reference
from tests.fla_stand_in import HAS_PACKED_DELTA, import_reference
from tests.gpu.test_megatron_cuda import ALL_LINEAR, BACKEND, SPARSE, distance, loaded_weights, megatron, needs, trained
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_PACKED_DELTA, reason="needs megatron-core>=0.19"),
    pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention"),
]
import_reference()
DELTA: dict[str, Any] = {
    "vocab_size": 4096,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-next": {**SPARSE, **DELTA, "model_type": "qwen3_next"},
    "qwen3.5": {**SPARSE, **DELTA, "model_type": "qwen3_5_text"},
    "qwen3.5-moe": {**SPARSE, **DELTA, "model_type": "qwen3_5_moe_text"},
}
LAYOUTS = [
    pytest.param(name, world, Case(max_tokens=2048, megatron=sizes), marks=needs(world), id=f"{name}-{world}-{label}")
    for name in MODELS
    for world, label, sizes in [
        (1, "one", ParallelSizes()),
        (2, "tp2", ParallelSizes(tp=2, sequence_parallel=True)),
        (2, "pp2", ParallelSizes(pp=2)),
        (2, "dp2", ParallelSizes()),
        (2, "cp2", ParallelSizes(cp=2)),
        (2, "ep2", ParallelSizes(ep=2)),
    ]
    if name != "qwen3.5" or sizes.ep == 1
]


def with_one_configuration(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`work(*args, **options)` with the first configuration of each kernel, since timing all of them takes minutes."""
    from triton.runtime.autotuner import Autotuner

    start = Autotuner.__init__

    def start_with_one(self: Any, fn: Any, arg_names: Any, configs: Sequence[Any], *rest: Any, **named: Any) -> None:
        start(self, fn, arg_names, configs[:1], *rest, **named)

    Autotuner.__init__ = start_with_one
    import_reference()
    return work(*args, **options)


@pytest.mark.parametrize(("name", "world", "case"), LAYOUTS)
def test_the_weights_are_those_of_the_source_bit_by_bit(name: str, world: int, case: Case) -> None:
    work = partial(with_one_configuration, loaded_weights)
    assert run_ranks(world, work, MODELS[name], case, backend=BACKEND) == [[]] * world


@cache
def trained_alone(name: str, *, adapters: bool) -> list[tuple[float, float]]:
    """Losses and gradient norms on one GPU."""
    case = Case(max_tokens=2048, lora=ALL_LINEAR if adapters else None)
    return run_ranks(1, partial(with_one_configuration, trained), MODELS[name], case, backend=BACKEND)[0]


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("name", "world", "case"), LAYOUTS)
def test_every_layout_trains_as_one_gpu_does(name: str, world: int, case: Case, adapters: bool) -> None:
    alone = trained_alone(name, adapters=adapters)
    case = replace(case, lora=ALL_LINEAR if adapters else None, gradient_checkpointing=world == 2)
    for losses in run_ranks(world, partial(with_one_configuration, trained), MODELS[name], case, backend=BACKEND):
        print(losses, alone)
        for (loss, norm), (loss_alone, norm_alone) in zip(losses, alone, strict=True):
            assert loss == pytest.approx(loss_alone, rel=0.02, abs=0.02)
            assert norm == pytest.approx(norm_alone, rel=0.05)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 0.02), ("bfloat16", 0.15)])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_loss_and_gradients_are_near_the_float64_reference(name: str, dtype: str, near: float) -> None:
    outputs, loss, gradients = reference(name, "lm")
    work = partial(with_one_configuration, one_step)
    (rank,) = run_ranks(1, work, partial(megatron, dtype=dtype), name, "lm", Case(rows=3), backend=BACKEND)
    apart = {output: distance(rank["outputs"][output], expected) for output, expected in outputs.items()}
    flat = [torch.cat([tensors[n].flatten() for n in gradients]) for tensors in (rank["gradients"], gradients)]
    print(name, dtype, apart, rank["metrics"]["loss"], loss, distance(*flat))
    assert max(apart.values()) < 0.05
    assert rank["metrics"]["loss"] == pytest.approx(loss, rel=0.5, abs=0.05)
    assert rank["gradients"].keys() == gradients.keys()
    assert distance(*flat) < near
