"""Adapters: every engine trains the same ones, from the same first values, as the float64 reference says.

The reference is the model with its weights merged, in one process: with dW the gradient of a merged weight
W + s * B @ A, that of A is s * B.T @ dW and that of B is s * dW @ A.T.
"""

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

import rlsys.engines.megatron.engine  # noqa: F401  imported once, before ranks are forked
from rlsys.models.hf import saved_names
from rlsys.models.lora import to_saved_name
from rlsys.models.megatron.parallel import ParallelSizes
from tests.contracts.test_train_engine import distance, my_rows, resumed, train, whole
from tests.contracts.train_engine import (
    ENGINES,
    MODELS,
    TEMPERATURE,
    TP2_EP2,
    Case,
    Factory,
    Lora,
    collected,
    loss_of,
    make_batch,
    one_step,
    reference_model,
    reference_outputs,
)
from tests.ranks import run_ranks

RANK, ALPHA = 3, 6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
Expected = tuple[Lora, dict[str, Tensor], float, dict[str, Tensor]]


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
    settings = Lora(rank=99, path=str(place / "adapter"))
    return settings, {n: v.detach() for n, v in outputs.items()}, float(mean.detach()), gradients


def save_adapter(factors: dict[str, tuple[Tensor, Tensor]], targets: tuple[str, ...], place: Path) -> None:
    place.mkdir()
    tensors = {}
    for layer, pair in factors.items():
        tensors |= {to_saved_name(f"{layer}.lora_{p}.default.weight"): t for p, t in zip("AB", pair, strict=True)}
    save_file(tensors, place / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets)}
    (place / "adapter_config.json").write_text(json.dumps(config))


def megatron(rows: int = 3, *, recompute: bool = False, **sizes: Any) -> Case:
    return Case(rows=rows, gradient_checkpointing=recompute, megatron=ParallelSizes(**sizes))


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
    ("megatron", "qwen2-tied", "lm", ALL, 2, megatron(cp=2)),
    ("megatron", "qwen3-moe", "lm", ALL, 2, megatron(ep=2)),
    ("megatron", "qwen3-moe", "lm", ATTENTION, 2, Case(rows=3, megatron=TP2_EP2)),
    ("megatron", "deepseek-v3", "lm", (*LATENT, *MLP), 2, Case(rows=3, megatron=TP2_EP2)),
]
SLOW_RUNS = [
    ("megatron", "qwen2-tied", "lm", ALL, 4, megatron(1, cp=2, tp=2, sequence_parallel=True, recompute=True)),
    ("megatron", "qwen3-moe", "lm", ALL, 2, megatron(**SP)),
    ("megatron", "mixtral", "lm", (*ATTENTION, "w1", "w2", "w3"), 2, megatron(ep=2, recompute=True)),
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
        gradient = collected(ranks, name)
        torch.testing.assert_close(gradient, values.float(), rtol=1e-5, atol=4e-6)
    for rank in ranks:
        assert rank["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert rank["gradients"].keys() == gradients.keys()
        far = {name: d for name, g in gradients.items() if (d := distance(rank["gradients"][name], g)) > 2e-5}
        assert not far
        assert rank["report"].grad_norm == pytest.approx(norm, rel=1e-5)
        assert all(torch.equal(tensor, ranks[0]["weights"][name]) for name, tensor in rank["weights"].items())


FRESH = Lora(RANK, ALPHA, ATTENTION)
ON_PARTS = {
    "tp2": megatron(2, **SP),
    "pp2": megatron(2, pp=2),
    "experts": megatron(2, tp=2, ep=2, etp=1, sequence_parallel=True),
}


def three_steps(factory: Factory, model: str, case: Case) -> tuple[list[Any], dict[str, Tensor]]:
    engine = factory(MODELS[model], "lm", case)
    rows = my_rows(engine)
    return [train(engine, rows) for _ in range(3)], whole(engine)


KINDS = [("qwen2-tied", "tp2"), pytest.param("qwen2-tied", "pp2", marks=pytest.mark.slow), ("qwen3-moe", "experts")]


@pytest.mark.parametrize(("model", "case"), KINDS)
def test_every_engine_trains_the_same_adapters_from_the_same_first_values(model: str, case: str) -> None:
    fsdp = run_ranks(2, three_steps, ENGINES["fsdp"], model, Case(rows=2, lora=FRESH))[0]
    for reports, weights in run_ranks(2, three_steps, ENGINES["megatron"], model, replace(ON_PARTS[case], lora=FRESH)):
        assert [r.grad_norm for r in reports] == pytest.approx([r.grad_norm for r in fsdp[0]], rel=1e-4)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, fsdp[1][name], rtol=0, atol=2e-6)


ALL_LINEAR = Lora(RANK, ALPHA)


def lived(model: str, case: Case, place: Path) -> dict[str, Any]:
    """What holds of an engine with adapters from its making to its export."""
    plain = ENGINES["megatron"](MODELS[model], "lm", replace(case, lora=None))
    engine = ENGINES["megatron"](MODELS[model], "lm", replace(case, lora=ALL_LINEAR))
    rows = my_rows(engine)
    values = lambda: engine.forward(rows, ("log_probs",), temperature=TEMPERATURE)["log_probs"]  # noqa: E731
    start, first = whole(plain), values()
    assert torch.equal(first, plain.forward(rows, ("log_probs",), temperature=TEMPERATURE)["log_probs"])
    assert all(torch.equal(tensor, start[name]) for name, tensor in whole(engine).items())
    in_buffers = {
        name
        for chunk in engine.optimizer.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        for name, parameter in chunk.named_parameters()
        if parameter in buffer.param_index_map
    }
    trained = {name for chunk in engine.optimizer.chunks for name, p in chunk.named_parameters() if p.requires_grad}
    assert in_buffers == trained
    assert all(".lora." in name for name in trained)
    for _ in range(3):
        assert train(engine, rows).applied
    with engine.adapters_disabled():
        assert torch.equal(values(), first)
    merged = whole(engine)
    layout, local = engine.weight_layout(), engine.local_tensors()
    for shard in layout.shards:
        box = tuple(slice(s, s + n) for s, n in zip(shard.box.start, shard.box.shape, strict=True))
        at = tuple(slice(s, s + n) for s, n in zip(shard.local_start, shard.box.shape, strict=True))
        assert torch.equal(local[shard.local][at], merged[shard.box.tensor][box])
    engine.save(place / "export", "export")
    again = replace(ALL_LINEAR, rank=99, path=str(place / "export/lora_adapter"))
    taken_up = ENGINES["megatron"](MODELS[model], "lm", replace(case, lora=again))
    assert all(torch.equal(tensor, merged[name]) for name, tensor in whole(taken_up).items())
    log_probs = values()
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, start[name])}
    return {"merged": merged, "moved": moved, "change": float((log_probs - first).abs().max()), "start": start}


@pytest.mark.parametrize(("model", "case"), KINDS)
def test_adapters_alone_are_trained_switched_off_served_exported_and_taken_up_again(
    model: str, case: str, tmp_path: Path
) -> None:
    result = run_ranks(2, lived, model, ON_PARTS[case], tmp_path)[0]
    assert result["change"] > 1e-4
    assert result["moved"] == {name for name in result["merged"] if name.endswith("_proj.weight")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    saved = saved_names(loaded, dict(loaded.named_parameters()))
    assert all(torch.equal(saved[name], tensor) for name, tensor in result["merged"].items())
    config = json.loads((tmp_path / "export/lora_adapter/adapter_config.json").read_text())
    with safe_open(tmp_path / "export/lora_adapter/adapter_model.safetensors", framework="pt") as file:
        factors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, sorted(ALL))
    assert len(factors) == 2 * len(result["moved"])
    for name in result["moved"]:
        a, b = (factors[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
        merged = result["start"][name] + ALPHA / RANK * (b @ a)
        torch.testing.assert_close(result["merged"][name], merged, rtol=1e-6, atol=1e-7)


PARTS = replace(ON_PARTS["tp2"], lora=FRESH)


@pytest.mark.parametrize(
    "case", [PARTS, pytest.param(replace(ON_PARTS["pp2"], lora=FRESH), marks=pytest.mark.slow)], ids=str
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(case: Case, tmp_path: Path) -> None:
    first, second = (run_ranks(2, resumed, ENGINES["megatron"], tmp_path, case, again) for again in (None, case))
    for a, b in zip(first, second, strict=True):
        assert a[:2] == b[:2]
        assert all(torch.equal(tensor, b[2][name]) for name, tensor in a[2].items())
        assert a[3] == b[3]


@pytest.mark.parametrize(
    ("writer", "case", "reader", "world", "other"),
    [
        ("megatron", PARTS, "megatron", 1, Case(rows=3, lora=FRESH)),
        ("megatron", PARTS, "fsdp", 2, Case(rows=2, lora=FRESH)),
        ("fsdp", Case(rows=2, lora=FRESH), "megatron", 2, replace(ON_PARTS["pp2"], lora=FRESH)),
    ],
)
def test_a_checkpoint_loads_into_another_layout_and_another_engine(
    writer: str, case: Case, reader: str, world: int, other: Case, tmp_path: Path
) -> None:
    uninterrupted = run_ranks(2, resumed, ENGINES[writer], tmp_path, case, None)[0]
    for result in run_ranks(world, resumed, ENGINES[reader], tmp_path, case, other):
        for name, tensor in uninterrupted[2].items():
            torch.testing.assert_close(result[2][name], tensor, rtol=0, atol=2e-6)
        assert [r.grad_norm for r in result[:2]] == pytest.approx([r.grad_norm for r in uninterrupted[:2]], rel=1e-4)
