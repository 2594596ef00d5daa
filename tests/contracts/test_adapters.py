"""Adapters: every engine trains the same ones, from the same first values, as the float64 reference says.

The reference is the model with its weights merged, in one process: with dW the gradient of a merged weight
W + s * B @ A, that of A is s * B.T @ dW and that of B is s * dW @ A.T.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import rlsys.engines.megatron  # noqa: F401  imported once, before ranks are forked
from rlsys.models.hf import saved_names
from rlsys.models.lora import LoraSettings, to_saved_name
from rlsys.models.megatron.options import Sizes
from tests.contracts.train_engine import (
    ENGINES,
    MODELS,
    TEMPERATURE,
    TP2_EP2,
    TP2_SP,
    Case,
    Factory,
    loss_of,
    make_batch,
    one_step,
    reference_model,
    reference_outputs,
)
from tests.contracts.test_train_engine import distance, my_rows, resumed, train, whole
from tests.ranks import run_ranks

RANK, ALPHA = 3, 6.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
Expected = tuple[LoraSettings, dict[str, Tensor], float, dict[str, Tensor]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, tuple[str, ...]], Expected]:
    """Settings that start from an adapter of random numbers, and outputs, mean loss and gradients with it."""
    known: dict[tuple[str, str, tuple[str, ...]], Expected] = {}

    def of(name: str, head: str, targets: tuple[str, ...]) -> Expected:
        key = (name, head, targets)
        if key not in known:
            known[key] = adapted_reference(name, head, targets, tmp_path_factory.mktemp("adapter"))
        return known[key]

    return of


def adapted_reference(name: str, head: str, targets: tuple[str, ...], place: Path) -> Expected:
    reference_model(name, head).save_pretrained(place / "model")
    file = place / "model/model.safetensors"
    weights = load_file(file)
    draw = torch.Generator().manual_seed(7)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for weight, base in sorted(weights.items()):
        if weight.startswith("model.layers.") and weight.split(".")[-2] in targets and base.ndim == 2:
            a = 0.1 * torch.randn(RANK, base.shape[1], generator=draw)
            b = 0.1 * torch.randn(base.shape[0], RANK, generator=draw)
            factors[weight.removesuffix(".weight")] = (a, b)
            weights[weight] = base + ALPHA / RANK * (b.double() @ a.double())
    save_file(weights, file, metadata={"format": "pt"})
    save_adapter(factors, targets, place / "adapter")
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
    eager: dict[str, Any] = {k: v for k, v in MODELS[name].items() if k == "experts_implementation"}
    model = auto.from_pretrained(place / "model", dtype=torch.float64, attn_implementation="eager", **eager)
    batch = make_batch()
    outputs = reference_outputs(model, head, batch)
    loss = loss_of(outputs, batch)
    mean = loss.total / loss.count
    mean.backward()
    slopes = saved_names(model, {n: p.grad for n, p in model.named_parameters()})
    gradients = {n: g for n, g in slopes.items() if n.startswith("score.")}
    for layer, (a, b) in factors.items():
        slope = ALPHA / RANK * slopes[f"{layer}.weight"]
        gradients[f"{layer}.lora_A.default.weight"] = b.double().T @ slope
        gradients[f"{layer}.lora_B.default.weight"] = slope @ a.double().T
    settings = LoraSettings(rank=99, adapter_path=str(place / "adapter"))
    return settings, {n: v.detach() for n, v in outputs.items()}, float(mean.detach()), gradients


def save_adapter(factors: dict[str, tuple[Tensor, Tensor]], targets: tuple[str, ...], place: Path) -> None:
    place.mkdir()
    tensors = {}
    for layer, pair in factors.items():
        tensors |= {to_saved_name(f"{layer}.lora_{p}.default.weight"): t for p, t in zip("AB", pair, strict=True)}
    save_file(tensors, place / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets)}
    (place / "adapter_config.json").write_text(json.dumps(config))


def megatron(rows: int = 3, recompute: bool = False, **sizes: Any) -> Case:
    return Case(rows=rows, gradient_checkpointing=recompute, megatron=Sizes(**sizes))


SP = {"tp": 2, "sequence_parallel": True}
RUNS: list[tuple[str, str, str, tuple[str, ...], int, Case]] = [
    ("fsdp", "qwen2-tied", "lm", ALL, 1, Case(rows=3)),
    ("fsdp", "llama-untied", "scalar", ALL, 2, Case(rows=3)),
    ("megatron", "qwen2-tied", "lm", ALL, 1, megatron()),
    ("megatron", "qwen2-tied", "lm", ALL, 2, megatron(recompute=True)),
    ("megatron", "qwen2-tied", "lm", ALL, 2, megatron(tp=2)),
    ("megatron", "qwen2-tied", "lm", ("q_proj", "v_proj", "down_proj"), 2, megatron(**SP)),
    ("megatron", "llama-1-kv", "lm", ALL, 2, megatron(tp=2)),
    ("megatron", "llama-untied", "scalar", ALL, 2, megatron(**SP, recompute=True)),
    ("megatron", "qwen2-tied", "lm", ALL, 2, megatron(pp=2, recompute=True)),
    ("megatron", "qwen3-4-layers", "lm", ALL, 2, megatron(2, pp=2, vp=2)),
    ("megatron", "qwen3-moe", "lm", ALL, 2, megatron(ep=2)),
    ("megatron", "qwen3-moe", "lm", ALL, 2, megatron(**SP)),
    ("megatron", "qwen3-moe", "lm", ATTENTION, 2, Case(rows=3, megatron=TP2_EP2)),
    ("megatron", "mixtral", "lm", (*ATTENTION, "w1", "w2", "w3"), 2, megatron(ep=2, recompute=True)),
    ("megatron", "deepseek-v3", "lm", (*LATENT, *MLP), 2, Case(rows=3, megatron=TP2_EP2)),
]
SLOW_RUNS = [
    ("megatron", "qwen2-tied", "lm", ALL, 4, megatron(1, tp=2, pp=2, sequence_parallel=True)),
    ("megatron", "qwen2-tied", "lm", ALL, 4, megatron(1, **SP)),
    ("megatron", "llama-1-kv", "lm", ALL, 4, megatron(1, **SP)),
    ("megatron", "llama-untied", "scalar", ALL, 4, megatron(tp=4)),
    ("megatron", "qwen3-4-layers", "lm", ALL, 4, megatron(1, tp=2, pp=2, vp=2)),
    ("megatron", "qwen3-moe", "lm", ALL, 4, megatron(ep=2, tp=2, sequence_parallel=True)),
    ("megatron", "qwen3-moe", "lm", ALL, 4, megatron(ep=2, pp=2)),
    ("megatron", "deepseek-v3", "lm", (*LATENT, *MLP), 4, megatron(tp=2, pp=2, sequence_parallel=True)),
]


def run_id(value: Any) -> str:
    return f"{len(value)}targets" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
    ("engine", "model", "head", "targets", "world", "case"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS)],
    ids=run_id,
)
def test_adapters_have_the_gradients_of_the_merged_model(
    expected: Any, engine: str, model: str, head: str, targets: tuple[str, ...], world: int, case: Case
) -> None:
    settings, outputs, loss, gradients = expected(model, head, targets)
    ranks = run_ranks(world, one_step, ENGINES[engine], model, head, replace(case, lora=settings))
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    for name, values in outputs.items():
        found = torch.cat([rank["outputs"][name] for rank in ranks if rank["collect"]])
        torch.testing.assert_close(found, values.float(), rtol=1e-5, atol=4e-6)
    for rank in ranks:
        assert rank["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert rank["gradients"].keys() == gradients.keys()
        far = {name: d for name, g in gradients.items() if (d := distance(rank["gradients"][name], g)) > 2e-5}
        assert not far
        assert rank["report"].grad_norm == pytest.approx(norm, rel=1e-5)
        assert all(torch.equal(tensor, ranks[0]["weights"][name]) for name, tensor in rank["weights"].items())
