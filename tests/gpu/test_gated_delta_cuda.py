"""Gated delta layers of Megatron on CUDA with flash-linear-attention: Qwen3-Next and Qwen3.5 on one GPU and two."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from rlsys.models.megatron.parallel import ParallelSizes
from tests.contracts.train_engine import Case, Lora, one_step, reference
from tests.fla_stand_in import HAS_PACKED_DELTA, import_reference
from tests.gpu.test_megatron_cuda import (
    ALL_LINEAR,
    BACKEND,
    SPARSE,
    Beside,
    Layout,
    beside,  # noqa: F401
    distance,
    loaded_weights,
    megatron,
    needs,
    trained,
)
from tests.ranks import Answers, run_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # the first test waits for all those that share its ranks
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
    pytest.param((name, Case(max_tokens=2048, megatron=sizes)), world, marks=needs(world), id=f"{name}-{world}-{label}")
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
BUILDS_S = 420.0
"""What a case may take that builds the kernels first."""


def with_one_configuration(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)` with the first configuration of each kernel: building and timing all of them takes minutes."""
    from triton.runtime.autotuner import Autotuner

    start = Autotuner.__init__

    def start_with_one(self: Any, fn: Any, arg_names: Any, configs: Sequence[Any], *rest: Any, **named: Any) -> None:
        start(self, fn, arg_names, configs[:1], *rest, **named)

    if "fla" not in sys.modules:
        Autotuner.__init__ = start_with_one
    return work(*args)


@cache
def answers(work: Callable[..., Any], world: int, layouts: Beside, lora: Lora | None = None) -> Answers:
    """What a work says of every layout of a world size, whose ranks it shares, and on one GPU of each model by name."""
    cases: dict[Any, Layout] = {layout: layout for layout, size in layouts if size == world}
    if world == 1:
        cases |= {name: (name, Case(max_tokens=2048)) for (name, _), _ in layouts}
    works = {
        key: partial(with_one_configuration, work, MODELS[name], replace(case, lora=lora))
        for key, (name, case) in cases.items()
    }
    return run_cases(world, works, backend=BACKEND, deadline_s=BUILDS_S)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_the_weights_are_those_of_the_source_bit_by_bit(layout: Layout, world: int, beside: Beside) -> None:  # noqa: F811
    assert answers(loaded_weights, world, beside)[layout] == [[]] * world


@pytest.mark.parametrize("lora", [None, ALL_LINEAR], ids=["full", "lora"])
@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_every_layout_trains_as_one_gpu_does(
    layout: Layout,
    world: int,
    lora: Lora | None,
    beside: Beside,  # noqa: F811
) -> None:
    (alone,) = answers(trained, 1, beside, lora)[layout[0]]
    for losses in answers(trained, world, beside, lora)[layout]:
        print(losses, alone)
        for (loss, norm), (loss_alone, norm_alone) in zip(losses, alone, strict=True):
            assert loss == pytest.approx(loss_alone, rel=0.02, abs=0.02)
            assert norm == pytest.approx(norm_alone, rel=0.05)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 0.02), ("bfloat16", 0.15)])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_loss_and_gradients_are_near_the_float64_reference(name: str, dtype: str, near: float) -> None:
    outputs, loss, gradients = reference(name, "lm")
    step = partial(one_step, partial(megatron, dtype=dtype), name, "lm", Case(rows=3))
    cases = {"": partial(with_one_configuration, step)}
    (rank,) = run_cases(1, cases, backend=BACKEND, deadline_s=BUILDS_S)[""]
    apart = {output: distance(rank["outputs"][output], expected) for output, expected in outputs.items()}
    flat = [torch.cat([tensors[n].flatten() for n in gradients]) for tensors in (rank["gradients"], gradients)]
    print(name, dtype, apart, rank["metrics"]["loss"], loss, distance(*flat))
    assert max(apart.values()) < 0.05
    assert rank["metrics"]["loss"] == pytest.approx(loss, rel=0.5, abs=0.05)
    assert rank["gradients"].keys() == gradients.keys()
    assert distance(*flat) < near
