"""MegatronEngine on CUDA: bf16 with float32 masters, Transformer Engine where it is there, one GPU and several."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.config.schema.model import ModelConfig, OptimConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.models.hf import open_weights, read_config, read_whole
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.protocol import DataProto
from tests.contracts.test_adapters import ALL, LATENT, MLP, Expected, adapted_reference
from tests.contracts.train_engine import (
    MODELS,
    OUTPUTS,
    SEED,
    Case,
    Lora,
    loss_of,
    megatron_section,
    model_config,
    one_step,
    optim_config,
    reference,
    waits_of,
)
from tests.engine_gradients import gradients
from tests.ranks import Answers, params_beside, run_cases, run_ranks
from tests.router_losses import LOSSES, router_gradients

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # the first test waits for all those that share its ranks
    pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core"),
]
BACKEND = "cpu:gloo,cuda:nccl"
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
}
EVEN: dict[str, Any] = {
    **SMOLLM2,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SPARSE: dict[str, Any] = {
    **{k: v for k, v in EVEN.items() if k not in ("model_type", "tie_word_embeddings")},
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def needs(gpus: int) -> Any:
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} GPUs")


def megatron(model: Mapping[str, Any], head: str = "lm", case: Case = Case(max_tokens=4096), **section: Any) -> Any:  # noqa: B008
    from rlsys.engines.megatron.engine import MegatronEngine

    return MegatronEngine(
        model_config(model, case),
        TrainEngineOptions(
            head=head,  # type: ignore[arg-type]
            device=f"cuda:{dist.get_rank()}",
            optim=optim_config(case),
            training=MicroBatches(rows=case.rows, max_tokens=case.max_tokens),
        ),
        megatron=megatron_section(case.megatron, **{"seed": SEED, "dtype": "bfloat16", **section}),
    )


def fsdp(model: Mapping[str, Any]) -> FSDPEngine:
    return FSDPEngine(
        model_config(model, Case()),
        TrainEngineOptions(
            device=f"cuda:{dist.get_rank()}", optim=OptimConfig(lr=1e-3), training=MicroBatches(max_tokens=4096)
        ),
        shard=ShardConfig(dtype="bfloat16", seed=SEED),
    )


def rows_of(vocab: int, num: int = 8, prompt: int = 64, response: int = 192) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocab, (num, prompt + response), generator=draw)
    lengths = torch.randint(8, response, (num, 1), generator=draw)
    mask = (torch.arange(prompt + response) < prompt + lengths).long()
    return DataProto.from_dict(
        {
            "input_ids": ids * mask,
            "prompts": ids[:, :prompt],
            "responses": (ids * mask)[:, prompt:],
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1) * mask,
            "response_mask": mask[:, prompt:],
            "weights": torch.ones(num, response),
        }
    )


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def both_log_probs() -> dict[str, float]:
    rows = rows_of(SMOLLM2["vocab_size"])
    outputs = [
        engine.forward(rows, ("log_probs", "entropy"), temperature=1.0) for engine in (megatron(SMOLLM2), fsdp(SMOLLM2))
    ]
    mask = rows.tensors["response_mask"].bool()
    return {name: float((outputs[0][name] - outputs[1][name])[mask].abs().mean()) for name in outputs[0]}


def test_log_probs_are_those_of_fsdp_in_bf16() -> None:
    (apart,) = run_ranks(1, both_log_probs, backend=BACKEND)
    print(apart)
    assert apart["log_probs"] < 0.02
    assert apart["entropy"] < 0.02


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for bucket in engine.weights(1 << 28) for name, tensor in bucket}


Layout = tuple[str, Case]
"""The name of a model, and how ranks split it."""
Beside = tuple[tuple[Layout, int], ...]
LAYOUT_MODELS = {"dense": EVEN, "sparse": SPARSE}
LAYOUTS = [
    pytest.param((name, Case(max_tokens=2048, megatron=sizes)), world, marks=needs(world), id=f"{name}-{world}-{label}")
    for name in LAYOUT_MODELS
    for world, label, sizes in [
        (1, "one", ParallelSizes()),
        (2, "tp2", ParallelSizes(tp=2, sequence_parallel=True)),
        (2, "pp2", ParallelSizes(pp=2)),
        (2, "vp2", ParallelSizes(pp=2, vp=2)),
        (2, "dp2", ParallelSizes()),
        (2, "cp2", ParallelSizes(cp=2)),
        (2, "ep2", ParallelSizes(ep=2)),
        (2, "cp2ep2", ParallelSizes(cp=2, ep=2)),
        (4, "cp2tp2", ParallelSizes(cp=2, tp=2, sequence_parallel=True)),
        (4, "cp2pp2", ParallelSizes(cp=2, pp=2)),
    ]
    if name == "sparse" or sizes.ep == 1
]


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Beside:
    """The layouts and world sizes of the tests of the same function that this session runs; one size shares ranks."""
    return tuple((params["layout"], params["world"]) for params in params_beside(request))


def loaded_weights(model: dict[str, Any], case: Case) -> list[str]:
    """Names of tensors that are not, bit by bit, those of the source."""
    source = ModelConfig(override_config=model)
    expected = open_weights(source, read_config(source), head="lm", seed=SEED)
    loaded = whole(megatron(model, case=case))
    return [name for name, tensor in loaded.items() if not torch.equal(tensor, read_whole(expected[name]).to(tensor))]


@cache
def loaded(world: int, beside: Beside) -> Answers:
    layouts = [layout for layout, size in beside if size == world]
    cases = {(name, case): partial(loaded_weights, LAYOUT_MODELS[name], case) for name, case in layouts}
    return run_cases(world, cases, backend=BACKEND)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_the_weights_are_those_of_the_source_bit_by_bit(layout: Layout, world: int, beside: Beside) -> None:
    assert loaded(world, beside)[layout] == [[]] * world


def trained(model: dict[str, Any], case: Case, steps: int = 3) -> list[tuple[float, float]]:
    """Losses and gradient norms, without what Megatron compiles: every rank would compile it for itself, again for each
    layout. Other tests train with it."""
    torch.compiler.set_stance("force_eager")
    engine = megatron(model, case=case)
    rows = rows_of(model["vocab_size"])
    share = len(rows) // engine.dp_size
    mine = rows[engine.dp_rank * share : (engine.dp_rank + 1) * share]
    losses = []
    for _ in range(steps):
        loss = engine.forward_backward(mine, loss_of)["loss"]
        losses.append((loss, engine.optim_step().grad_norm))
    return losses


ALL_LINEAR = Lora(rank=8, alpha=16)


@cache
def trained_layouts(world: int, beside: Beside, lora: Lora | None) -> Answers:
    """What `trained` says of every layout, and on one GPU of every model by its name alone."""
    cases: dict[Any, Any] = {layout: layout for layout, size in beside if size == world}
    if world == 1:
        cases |= {name: (name, Case(max_tokens=2048)) for (name, _), _ in beside}
    works = {
        key: partial(trained, LAYOUT_MODELS[name], replace(case, lora=lora)) for key, (name, case) in cases.items()
    }
    return run_cases(world, works, backend=BACKEND)


def assert_trains_as_one_gpu_does(layout: Layout, world: int, beside: Beside, lora: Lora | None) -> None:
    (alone,) = trained_layouts(1, beside, lora)[layout[0]]
    for losses in trained_layouts(world, beside, lora)[layout]:
        print(losses, alone)
        for (loss, norm), (loss_alone, norm_alone) in zip(losses, alone, strict=True):
            assert loss == pytest.approx(loss_alone, rel=0.02, abs=0.02)
            assert norm == pytest.approx(norm_alone, rel=0.05)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_every_layout_trains_as_one_gpu_does(layout: Layout, world: int, beside: Beside) -> None:
    assert_trains_as_one_gpu_does(layout, world, beside, lora=None)


@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_every_layout_trains_the_same_adapters(layout: Layout, world: int, beside: Beside) -> None:
    assert_trains_as_one_gpu_does(layout, world, beside, lora=ALL_LINEAR)


@dataclass(frozen=True)
class Shared:
    """A model whose sequences two GPUs share, and how far from one GPU's numbers it may be: outputs on average, and
    gradients against their norm."""

    model: Mapping[str, Any]
    outputs: float
    gradients: float
    head: str = "lm"
    ep: int = 1
    recompute: bool = False
    dtype: str = "bfloat16"
    fp8: str | None = None


VOCABULARY = {"vocab_size": 4096}
SMALL = {**EVEN, **VOCABULARY}
SHARED = {
    "dense": Shared(SMALL, 0.02, 0.1),
    "values": Shared(SMALL, 0.02, 0.1, head="scalar"),
    "recomputed": Shared(SMALL, 0.02, 0.1, recompute=True),
    "sparse": Shared({**SPARSE, **VOCABULARY}, 0.02, 0.2, ep=2),
    "latent": Shared(MODELS["deepseek-v3"], 0.02, 0.1),
    "sinks": Shared(MODELS["gpt-oss"], 0.02, 0.1, ep=2),
    "float32": Shared(SMALL, 2e-3, 0.01, dtype="float32"),
    "fp8": Shared(SMALL, 0.1, 0.4, fp8="hybrid"),
}


def shared_numbers(case: Shared) -> dict[str, Any]:
    """Outputs and gradients, of the first rank."""
    shared = dist.get_world_size() > 1
    sizes = ParallelSizes(cp=2, ep=case.ep) if shared else ParallelSizes()
    rows, outputs = rows_of(case.model["vocab_size"]), OUTPUTS[case.head]
    split = Case(max_tokens=1024, megatron=sizes, gradient_checkpointing=case.recompute)
    engine = megatron(case.model, case.head, split, dtype=case.dtype, fp8=case.fp8)
    forward = engine.forward(rows, outputs)
    metrics = engine.forward_backward(rows, loss_of, outputs=outputs)
    flat = torch.cat([gradient.flatten().cpu() for gradient in gradients(engine).values()])
    norm = engine.optim_step().grad_norm
    numbers = {"outputs": forward, "gradients": flat, "metrics": metrics, "norm": norm}
    return numbers if dist.get_rank() == 0 else {}


@cache
def numbers(world: int) -> Answers:
    return run_cases(world, {name: partial(shared_numbers, case) for name, case in SHARED.items()}, backend=BACKEND)


@needs(2)
@pytest.mark.parametrize("name", list(SHARED))
def test_shared_sequences_have_the_numbers_of_one_gpu(name: str) -> None:
    alone, shared, case = numbers(1)[name][0], numbers(2)[name][0], SHARED[name]
    mask = rows_of(case.model["vocab_size"]).tensors["response_mask"].bool()
    off = {k: float((shared["outputs"][k] - v)[mask].abs().mean()) for k, v in alone["outputs"].items()}
    far = distance(shared["gradients"], alone["gradients"])
    norms = shared["norm"], alone["norm"]
    print(name, off, f"gradients {far:.2e}, norms {norms}, losses", shared["metrics"]["loss"], alone["metrics"]["loss"])
    assert all(value < case.outputs for value in off.values())
    assert far < case.gradients
    assert norms[0] == pytest.approx(norms[1], rel=max(0.02, case.gradients / 4))
    assert shared["metrics"]["row_length"] == alone["metrics"]["row_length"]


def max_connections() -> str | None:
    megatron(EVEN, case=Case(max_tokens=4096, megatron=ParallelSizes(tp=2)))
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")


@needs(2)
def test_exchanges_of_cut_tensors_start_before_the_products_that_hide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert run_ranks(2, max_connections, backend=BACKEND) == ["1", "1"]


FLOAT64 = [
    *(("qwen2-tied", "lm"), ("llama-untied", "scalar"), ("gpt-oss", "lm")),
    *(("deepseek-v3", "lm"), ("deepseek-v3-full-q", "lm")),
]


@cache
def first_steps() -> Answers:
    cases = {(name, head): partial(one_step, megatron, name, head, Case(rows=3)) for name, head in FLOAT64}
    return run_cases(1, cases, backend=BACKEND)


@pytest.mark.parametrize(("name", "head"), FLOAT64)
def test_loss_and_gradients_are_near_the_float64_reference(name: str, head: str) -> None:
    outputs, loss, gradients = reference(name, head)
    (rank,) = first_steps()[name, head]
    for output, expected in outputs.items():
        assert distance(rank["outputs"][output], expected) < 0.05
    assert rank["metrics"]["loss"] == pytest.approx(loss, rel=0.5, abs=0.05)
    flat = [torch.cat([tensors[n].flatten() for n in gradients]) for tensors in (rank["gradients"], gradients)]
    assert distance(*flat) < 0.1


ROUTED: list[Any] = [
    pytest.param(ParallelSizes(), 1, id="one"),
    pytest.param(ParallelSizes(ep=2), 2, id="ep2", marks=needs(2)),
    pytest.param(ParallelSizes(tp=2, sequence_parallel=True), 2, id="tp2", marks=needs(2)),
    pytest.param(ParallelSizes(tp=2, ep=2, etp=1, sequence_parallel=True), 2, id="tp2ep2", marks=needs(2)),
]


def of_routers(sizes: ParallelSizes, loss: str, place: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = {**SPARSE, **VOCABULARY}
    engine = megatron(model, case=Case(max_tokens=4096, megatron=sizes), override_transformer_config=LOSSES[loss])
    return router_gradients(engine, place, loss)


@pytest.mark.parametrize(("sizes", "world"), ROUTED)
def test_losses_of_routers_have_the_gradients_of_the_float64_reference(
    sizes: ParallelSizes, world: int, tmp_path: Path
) -> None:
    """Which is a mean over all tokens: within the rounding to bfloat16, by which a token may change its expert."""
    answers = run_cases(
        world, {loss: partial(of_routers, sizes, loss, tmp_path / loss) for loss in LOSSES}, backend=BACKEND
    )
    for loss in LOSSES:
        for ours, theirs in answers[loss]:
            far = {name: distance(ours[name], gradient) for name, gradient in theirs.items()}
            print(loss, far)
            assert len(far) == SPARSE["num_hidden_layers"]
            assert max(far.values()) < 0.15


def with_fusion(model: dict[str, Any], case: Case, on: bool) -> dict[str, Any]:
    """Gradients of two calls, losses and norms of the steps after them, and how many matrices were added to in the
    product; by default where `on`."""
    section = {} if on else {"override_transformer_config": {"gradient_accumulation_fusion": False}}
    engine = megatron(model, case=case, **section)
    rows = rows_of(model["vocab_size"])
    share = len(rows) // engine.dp_size
    mine = rows[engine.dp_rank * share : (engine.dp_rank + 1) * share]
    half = len(mine) // 2
    for part in (mine[:half], mine[half:]):
        engine.forward_backward(part, loss_of)
    matrices = [
        p for chunk in engine.chunks for n, p in chunk.decoder.named_parameters() if "linear" in n and p.ndim == 2
    ]
    added = sum(p.grad_added_to_main_grad for p in matrices)
    flat = torch.cat([gradient.flatten().cpu() for gradient in gradients(engine).values()])
    steps = []
    for _ in range(3):
        report = engine.optim_step()
        steps.append((engine.forward_backward(mine, loss_of)["loss"], report.grad_norm))
    return {"gradients": flat, "steps": steps, "added": added, "of": len(matrices)}


FUSED = {
    1: [ParallelSizes()],
    2: [ParallelSizes(), ParallelSizes(tp=2, sequence_parallel=True), ParallelSizes(pp=2, vp=2)],
}


def both_ways(size: ParallelSizes) -> list[tuple[float, dict[str, Any], dict[str, Any]]]:
    """How far gradients with the fusion are from those without it, against their norm, and other numbers of each."""
    results = []
    for model in (SMALL, {**SPARSE, **VOCABULARY}):
        case = Case(max_tokens=1024, megatron=size, gradient_checkpointing=model is not SMALL)
        fused, other = (with_fusion(model, case, on) for on in (True, False))
        results.append((distance(fused.pop("gradients"), other.pop("gradients")), fused, other))
    return results


@cache
def fused(world: int) -> Answers:
    return run_cases(world, {size: partial(both_ways, size) for size in FUSED[world]}, backend=BACKEND)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        pytest.param(1, FUSED[1], id="one"),
        pytest.param(2, FUSED[2][:2], id="two", marks=needs(2)),
        pytest.param(2, FUSED[2][2:], id="stages", marks=needs(2)),
    ],
)
def test_products_add_gradients_themselves_and_they_are_the_same(world: int, sizes: list[ParallelSizes]) -> None:
    """Within the rounding of a gradient to bfloat16, which fused products do not need; over several calls, too."""
    for far, ours, other in [numbers for size in sizes for rank in fused(world)[size] for numbers in rank]:
        print(f"gradients {far:.2e}", ours, other)
        assert ours["added"] == ours["of"] > 0
        assert other["added"] == 0
        assert far < 0.01
        for (loss, norm), (other_loss, other_norm) in zip(ours["steps"], other["steps"], strict=True):
            assert loss == pytest.approx(other_loss, rel=0.02, abs=0.02)
            assert norm == pytest.approx(other_norm, rel=0.05)


ADAPTED = [("qwen2-tied", "lm", ALL), ("llama-untied", "scalar", ALL), ("deepseek-v3", "lm", (*LATENT, *MLP))]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Expected], Answers]:
    """The reference of each model, and its first step without and with recomputation."""
    expected, cases = {}, {}
    for name, head, targets in ADAPTED:
        expected[name] = adapted_reference(name, head, targets, tmp_path_factory.mktemp(name))
        for recompute in (False, True):
            case = Case(rows=3, gradient_checkpointing=recompute, lora=expected[name][0])
            cases[name, recompute] = partial(one_step, megatron, name, head, case)
    return expected, run_cases(1, cases, backend=BACKEND)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "head", "targets"), ADAPTED)
def test_adapters_have_the_gradients_of_the_float64_reference(
    name: str, head: str, targets: tuple[str, ...], recompute: bool, adapted: tuple[dict[str, Expected], Answers]
) -> None:
    _, outputs, loss, gradients = adapted[0][name]
    (rank,) = adapted[1][name, recompute]
    apart = {output: distance(rank["outputs"][output], expected) for output, expected in outputs.items()}
    assert rank["gradients"].keys() == gradients.keys()
    flat = [torch.cat([tensors[n].flatten() for n in gradients]) for tensors in (rank["gradients"], gradients)]
    print(name, apart, rank["metrics"]["loss"], loss, distance(*flat))
    assert max(apart.values()) < 0.05
    assert rank["metrics"]["loss"] == pytest.approx(loss, rel=0.5, abs=0.05)
    assert distance(*flat) < 0.1


def served(model: dict[str, Any]) -> dict[str, Any]:
    """Whether the engine without adapters and the pushed weights say the same as engines that hold just these."""
    engine, plain = megatron(model, case=Case(max_tokens=2048, lora=ALL_LINEAR)), megatron(model)
    rows = rows_of(model["vocab_size"])
    values = lambda e: e.forward(rows, ("log_probs",))["log_probs"]  # noqa: E731
    first = values(plain)
    for _ in range(3):
        engine.forward_backward(rows, loss_of)
        engine.optim_step()
    with engine.adapters_disabled():
        reference = torch.equal(values(engine), first)
    held = plain.held.local()
    for name, tensor in engine.local_tensors().items():
        held[name].copy_(tensor)
    return {"reference": reference, "pushed": torch.equal(values(engine), values(plain))}


@cache
def served_by_each() -> Answers:
    return run_cases(1, {name: partial(served, model) for name, model in LAYOUT_MODELS.items()}, backend=BACKEND)


@pytest.mark.parametrize("name", list(LAYOUT_MODELS))
def test_it_computes_with_the_weights_that_it_pushes_and_is_its_own_reference(name: str) -> None:
    (result,) = served_by_each()[name]
    assert result["reference"]
    assert result["pushed"]


def peak_of_a_step(lora: Lora | None) -> float:
    """Bytes that a training step without recomputation allocates on top of what is already allocated, per layer."""
    peaks = []
    for layers in (8, 40):
        engine = megatron({**EVEN, "num_hidden_layers": layers}, case=Case(rows=1, lora=lora))
        rows = rows_of(EVEN["vocab_size"], num=1, prompt=32, response=32)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.forward_backward(rows, loss_of)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        del engine
    return (peaks[3] - peaks[1]) / 32


def test_merged_weights_are_not_kept_for_the_backward_pass() -> None:
    peaks = run_cases(1, {lora: partial(peak_of_a_step, lora) for lora in (ALL_LINEAR, None)}, backend=BACKEND)
    (adapted,), (full,) = peaks[ALL_LINEAR], peaks[None]
    weights = 2 * (512 * (512 + 2 * 128) + 512 * 512 + 3 * 512 * 1536)
    print(adapted, full, weights)
    assert adapted - full < 0.3 * weights


def stepped(place: Path, moments_on_host: bool) -> tuple[dict[str, Tensor], list[float], int, int, bool]:
    """Weights, norms of two steps, bytes of the device after them and once the optimizer's state has moved to the host
    and back, and whether an engine continues from a checkpoint as this one does."""
    case = Case(max_tokens=4096, moments_on_host=moments_on_host)
    engine, rows = megatron(EVEN, case=case), rows_of(EVEN["vocab_size"])
    train = lambda one: (one.forward_backward(rows, loss_of), one.optim_step().grad_norm)[1]  # noqa: E731
    norms = [train(engine), train(engine)]
    allocated = torch.cuda.memory_allocated()
    engine.move(("optimizer",), "cpu")
    moved = torch.cuda.memory_allocated()
    engine.move(("optimizer",), f"cuda:{dist.get_rank()}")
    weights = whole(engine)
    engine.save(place, "resume")
    again = megatron(EVEN, case=case)
    again.load(place)
    norms += [train(engine), train(again)]
    ours, theirs = whole(engine), whole(again)
    same = all(torch.allclose(ours[name].float(), theirs[name].float(), atol=2e-3) for name in ours)
    return weights, norms, allocated, moved, same


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=needs(2))])
def test_moments_on_the_host_step_and_continue_as_those_of_the_gpu(world: int, tmp_path: Path) -> None:
    cases = {on_host: partial(stepped, tmp_path / str(on_host), on_host) for on_host in (False, True)}
    answers = run_cases(world, cases, backend=BACKEND)
    (weights, norms, allocated, moved, same), (host_weights, host_norms, host_allocated, host_moved, host_same) = (
        answers[on_host][0] for on_host in (False, True)
    )
    assert same
    assert host_same
    assert host_norms == pytest.approx(norms, rel=1e-3)
    assert host_norms[2] == pytest.approx(host_norms[3], rel=1e-3)
    elements = sum(tensor.numel() for tensor in weights.values()) // world
    assert allocated - moved == pytest.approx(12 * elements, rel=0.01)
    off = (allocated - moved) - (host_allocated - host_moved)  # up to 2.6 MB of others were seen to move in both
    assert off == pytest.approx(8 * elements, rel=0.005), "the masters move as before, and no moments"
    apart = torch.cat([(weights[name].float() - host_weights[name].float()).abs().flatten() for name in weights])
    assert float(apart.mean()) < 1e-4, "of two steps of 1e-3"


def moved(lora: Lora | None) -> dict[str, Any]:
    engine = megatron(EVEN, case=Case(max_tokens=4096, lora=lora))
    rows = rows_of(EVEN["vocab_size"])
    train = lambda: (engine.forward_backward(rows, loss_of)["loss"], engine.optim_step().grad_norm)  # noqa: E731
    train()
    before, full = whole(engine), torch.cuda.memory_allocated()
    engine.move(("params", "grads", "optimizer"), "cpu")
    left = torch.cuda.memory_allocated()
    engine.move(("params", "grads", "optimizer"), f"cuda:{dist.get_rank()}")
    same = all(torch.equal(tensor, before[name]) for name, tensor in whole(engine).items())
    return {"left": left / full, "same": same, "after": train()}


@cache
def moved_by_each() -> Answers:
    return run_cases(1, {lora: partial(moved, lora) for lora in (None, ALL_LINEAR)}, backend=BACKEND)


@pytest.mark.parametrize("lora", [None, ALL_LINEAR], ids=["full", "lora"])
def test_parts_move_to_the_host_and_back(lora: Lora | None) -> None:
    (result,) = moved_by_each()[lora]
    assert result["same"]
    assert lora or result["left"] < 0.2  # the libraries' workspaces stay
    assert all(value == value for value in result["after"])


def waits(num_rows: int) -> list[int]:
    return waits_of(megatron(EVEN, case=Case(rows=num_rows)), rows_of(EVEN["vocab_size"]))


def test_no_micro_batch_waits_for_the_gpu() -> None:
    places = run_cases(1, {num: partial(waits, num) for num in (1, 8)}, backend=BACKEND)
    assert places[1] == places[8]


def resumed(place: Path, first: bool) -> tuple[Any, dict[str, Tensor]]:
    engine = megatron(EVEN)
    rows = rows_of(EVEN["vocab_size"])
    if first:
        engine.forward_backward(rows, loss_of)
        engine.optim_step()
        engine.save(place, "resume")
    else:
        engine.load(place)
    engine.forward_backward(rows, loss_of)
    return engine.optim_step(), whole(engine)


def test_a_resumed_run_continues_like_the_uninterrupted_one(tmp_path: Path) -> None:
    (report, weights), (again, others) = (
        run_ranks(1, resumed, tmp_path / "step", first, backend=BACKEND)[0] for first in (True, False)
    )
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-3)
    assert all(torch.allclose(weights[name].float(), others[name].float(), atol=2e-3) for name in weights)


FP8 = [
    {"fp8": "hybrid"},
    *({"override_transformer_config": {"fp8": "hybrid", "fp8_recipe": way}} for way in ("tensorwise", "delayed")),
    {"override_transformer_config": {"fp8": "e4m3", "fp8_recipe": "blockwise"}},
]


@cache
def trained_in_each_fp8() -> Answers:
    cases: dict[str, Any] = {str(section): partial(trained_in_fp8, section) for section in FP8}
    return run_cases(1, {"bfloat16": partial(trained, EVEN, Case(max_tokens=2048)), **cases}, backend=BACKEND)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("section", FP8)
def test_fp8_trains(section: dict[str, Any]) -> None:
    (result,), (exact,) = trained_in_each_fp8()[str(section)], trained_in_each_fp8()["bfloat16"]
    assert result[0][0] == pytest.approx(exact[0][0], rel=0.05)
    assert all(0 < norm < float("inf") for _, norm in result)
    assert result[-1][0] < result[0][0] or exact[-1][0] >= exact[0][0]


def trained_in_fp8(section: dict[str, Any]) -> list[tuple[float, float]]:
    engine = megatron(EVEN, **section)
    rows = rows_of(EVEN["vocab_size"])
    return [(engine.forward_backward(rows, loss_of)["loss"], engine.optim_step().grad_norm) for _ in range(3)]
