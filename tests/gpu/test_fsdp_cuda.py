"""FSDPEngine on CUDA and NCCL: bf16 compute over float32 masters, varlen attention, offload, one and two ranks."""

from collections.abc import Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from rlsys.config.schema.model import OptimConfig, OverrideOptimizerConfig, ShardConfig
from rlsys.engines.base import TrainEngineOptions
from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.micro_batches import MicroBatches
from rlsys.protocol import DataProto
from tests.contracts.train_engine import (
    MODELS,
    OUTPUTS,
    ROWS,
    SEED,
    TEMPERATURE,
    Case,
    collected,
    loss_of,
    make_batch,
    model_config,
    one_step,
    reference,
    share_of,
    waits_of,
)
from tests.ranks import Answers, params_beside, run_cases, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # the first test waits for all those that share its ranks
BACKEND = "cpu:gloo,cuda:nccl"
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
WIDE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1408,
    "vocab_size": 32000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def needs(gpus: int) -> Any:
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} GPUs")


def cuda_engine(model: Mapping[str, Any], head: str, case: Case, **shard: Any) -> FSDPEngine:
    torch.backends.cuda.matmul.allow_tf32 = False
    return FSDPEngine(
        model_config(model, case),
        TrainEngineOptions(
            head=head,  # type: ignore[arg-type]
            device=f"cuda:{dist.get_rank()}",
            optim=OptimConfig(lr=case.lr),
            training=MicroBatches(rows=case.rows, max_tokens=case.max_tokens),
        ),
        shard=ShardConfig(
            fsdp_size=case.fsdp_size,
            tensor_parallel_size=case.tp_size,
            seed=SEED,
            **{"dtype": "bfloat16", **shard},
        ),
        sp_size=case.sp_size,
    )


def exact_engine(model: Mapping[str, Any], head: str, case: Case) -> FSDPEngine:
    return cuda_engine(model, head, case, dtype="float32")


def compiled_engine(model: Mapping[str, Any], head: str, case: Case) -> FSDPEngine:
    return cuda_engine(model, head, case, use_torch_compile=True)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


CASES = [
    pytest.param(world, case, marks=needs(world), id=f"{world}-{case}")
    for world, case in [
        (1, Case(rows=3)),
        (1, Case(max_tokens=30, gradient_checkpointing=True)),
        (1, Case(rows=3, packed=False)),
        (2, Case(rows=3)),
        (2, Case(rows=2, fsdp_size=1)),
        (2, Case(rows=3, tp_size=2)),
        (2, Case(max_tokens=20, sp_size=2, gradient_checkpointing=True)),
    ]
]


FACTORIES = [(exact_engine, 2e-5), (cuda_engine, 0.05)]
Step = tuple[Any, str, str, Case]
Beside = tuple[tuple[Step, int], ...]


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Beside:
    """The steps and world sizes of the tests of the same function that this session runs; one size shares ranks."""
    each = params_beside(request)
    return tuple(((of["factory"], of["model"], of["head"], of["case"]), of["world"]) for of in each)


@cache
def steps_of(world: int, beside: Beside) -> Answers:
    steps = [step for step, size in beside if size == world]
    return run_cases(world, {step: partial(one_step, *step) for step in steps}, backend=BACKEND)


@pytest.mark.parametrize(("world", "case"), CASES)
@pytest.mark.parametrize(("model", "head"), [("qwen2-tied", "lm"), ("llama-untied", "scalar"), ("qwen3-window", "lm")])
@pytest.mark.parametrize(("factory", "tolerance"), FACTORIES, ids=["float32", "bf16"])
def test_loss_and_gradients_on_cuda(
    factory: Any,
    tolerance: float,
    model: str,
    head: str,
    world: int,
    case: Case,
    beside: Beside,
) -> None:
    outputs, loss, gradients = reference(model, head)
    ranks = steps_of(world, beside)[factory, model, head, case]
    for name, expected in outputs.items():
        gradient = collected(ranks, name)
        assert distance(gradient, expected) < tolerance
    whole = torch.cat([g.flatten() for g in gradients.values()])
    for rank in ranks:
        assert rank["metrics"]["loss"] == pytest.approx(loss, rel=10 * tolerance, abs=tolerance)
        assert rank["report"].applied
        assert distance(torch.cat([rank["gradients"][n].flatten() for n in gradients]), whole) < tolerance


def test_compiled_layers_compute_the_same() -> None:
    _, loss, gradients = reference("qwen2-tied", "lm")
    (rank,) = run_ranks(1, one_step, compiled_engine, "qwen2-tied", "lm", Case(max_tokens=30), backend=BACKEND)
    assert rank["metrics"]["loss"] == pytest.approx(loss, rel=0.5, abs=0.05)
    whole = torch.cat([g.flatten() for g in gradients.values()])
    assert distance(torch.cat([rank["gradients"][name].flatten() for name in gradients]), whole) < 0.05


def graphs_of_many_packs() -> int:
    """Graphs that updates and log-probs of packs of many lengths compile."""
    engine = compiled_engine(MODELS["qwen2-tied"], "lm", Case(max_tokens=30))
    counters.clear()
    for count in range(1, ROWS + 1):
        rows = DataProto.from_dict(make_batch())[:count]
        engine.forward(rows, ("log_probs",), temperature=TEMPERATURE)
        engine.forward_backward(rows, loss_of, temperature=TEMPERATURE)
    return counters["stats"]["unique_graphs"]


def test_layers_are_compiled_once_for_packs_of_all_lengths() -> None:
    (graphs,) = run_ranks(1, graphs_of_many_packs, backend=BACKEND)
    assert graphs <= 4  # two for the layers; the statistics of logits have own ones from a vocabulary of 4096 on


HAS_8BIT = find_spec("bitsandbytes") is not None
NEEDS_8BIT = pytest.mark.skipif(not HAS_8BIT, reason="needs bitsandbytes")
OPTIMIZERS = {
    "Muon": OptimConfig(lr=1e-3, optimizer="Muon"),
    "AdamW8bit": OptimConfig(lr=1e-3, optimizer="AdamW8bit", optimizer_impl="bitsandbytes.optim"),
    "host": OptimConfig(lr=1e-3, override_optimizer_config=OverrideOptimizerConfig(optimizer_cpu_offload=True)),
    "AdamW": OptimConfig(lr=1e-3),
}


def optimizer_steps(kind: str, path: Path) -> tuple[dict[str, Tensor], int, bool]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    device, shard = f"cuda:{dist.get_rank()}", ShardConfig(seed=SEED, dtype="float32")
    options = TrainEngineOptions(device=device, optim=OPTIMIZERS[kind], training=MicroBatches(rows=2))
    build = partial(FSDPEngine, model_config(WIDE, Case(rows=2)), options, shard=shard)
    engine = build()
    before = torch.cuda.memory_allocated()
    engine.move(("optimizer",), "cpu")
    moments = before - torch.cuda.memory_allocated()
    engine.move(("optimizer",), device)
    train(engine)
    engine.save(path, "resume")
    again = build()
    again.load(path)
    train(engine)
    train(again)
    return whole(engine), moments, same(whole(engine), whole(again))


@cache
def steps_of_optimizers(world: int) -> Answers:
    kinds = [kind for kind in OPTIMIZERS if HAS_8BIT or kind != "AdamW8bit"]
    with TemporaryDirectory() as place:
        cases = {kind: partial(optimizer_steps, kind, Path(place) / kind) for kind in kinds}
        return run_cases(world, cases, backend=BACKEND)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=needs(2))])
@pytest.mark.parametrize("kind", ["Muon", pytest.param("AdamW8bit", marks=NEEDS_8BIT), "host"])
def test_optimizers_step_and_continue_on_cuda(kind: str, world: int) -> None:
    adamw, adamw_bytes, _ = steps_of_optimizers(world)["AdamW"][0]
    weights, moments_bytes, equal = steps_of_optimizers(world)[kind][0]
    assert equal
    assert moments_bytes < {"Muon": 0.9, "AdamW8bit": 0.3, "host": 0.01}[kind] * adamw_bytes
    if kind != "Muon":
        apart = torch.cat([(weights[name] - adamw[name]).abs().flatten() for name in adamw])
        assert float(apart.mean()) < 5e-5  # of two steps of 1e-3


def train(engine: FSDPEngine) -> Any:
    rows = DataProto.from_dict(make_batch())[share_of(engine.dp_rank, engine.dp_size)]
    engine.forward_backward(rows, loss_of, outputs=OUTPUTS["lm"], temperature=TEMPERATURE)
    return engine.optim_step()


def whole(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for bucket in engine.weights(1 << 20) for name, tensor in bucket}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def wander() -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    still, moved = (cuda_engine(WIDE, "lm", Case(rows=2)) for _ in range(2))
    reports = [(train(still), train(moved))]
    for engine in (still, moved):
        engine.forward_backward(DataProto.from_dict(make_batch()), loss_of)
    full = torch.cuda.memory_allocated()
    moved.move(("params", "optimizer"), "cpu")
    freed = full - torch.cuda.memory_allocated()
    moved.move(("params", "optimizer"), f"cuda:{dist.get_rank()}")
    back = torch.cuda.memory_allocated()
    reports.append((train(still), train(moved)))
    numel = sum(p.numel() for p in moved.model.parameters()) // dist.get_world_size()
    return {
        "reports": reports,
        "freed": freed / (16 * numel),
        "back": abs(back - full) / full,
        "same": same(whole(still), whole(moved)),
    }


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=needs(2))])
def test_parts_move_to_the_cpu_and_back_without_a_trace(world: int) -> None:
    for result in run_ranks(world, wander, backend=BACKEND):
        assert all(a == b for a, b in result["reports"])
        assert result["same"]
        assert result["freed"] == pytest.approx(1, abs=0.05)
        assert result["back"] < 0.01


def offload() -> tuple[bool, list[Any]]:
    engines = [cuda_engine(WIDE, "lm", Case(rows=2), offload_policy=c) for c in (False, True)]
    reports = [[train(engine) for _ in range(2)] for engine in engines]
    weights = [whole(engine) for engine in engines]
    near = all(torch.allclose(tensor, weights[1][name], atol=2e-3) for name, tensor in weights[0].items())
    return near, [[r.grad_norm for r in pair] for pair in reports]


def test_cpu_offload_computes_the_same() -> None:
    ((near, norms),) = run_ranks(1, offload, backend=BACKEND)
    assert near
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def save_and_continue(path: Path) -> dict[str, Tensor]:
    engine = cuda_engine(WIDE, "lm", Case(rows=2))
    train(engine)
    engine.save(path, "resume")
    train(engine)
    return {**whole(engine), "draw": torch.rand(3, device=engine.ranks.device).cpu()}


def load_and_continue(path: Path) -> dict[str, Tensor]:
    engine = cuda_engine(WIDE, "lm", Case(rows=2))
    engine.load(path)
    train(engine)
    return {**whole(engine), "draw": torch.rand(3, device=engine.ranks.device).cpu()}


@pytest.mark.parametrize("worlds", [(1, 1), pytest.param((2, 2), marks=needs(2)), pytest.param((2, 1), marks=needs(2))])
def test_resume_on_cuda(worlds: tuple[int, int], tmp_path: Path) -> None:
    first = run_ranks(worlds[0], save_and_continue, tmp_path / "s", backend=BACKEND)[0]
    second = run_ranks(worlds[1], load_and_continue, tmp_path / "s", backend=BACKEND)[0]
    if worlds[0] == worlds[1]:
        assert torch.equal(first["draw"], second["draw"])
    for name in set(first) - {"draw"}:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=2e-3)


def peak_bytes(recompute: bool, chunk_elements: int | None) -> int:
    engine = cuda_engine(WIDE, "lm", Case(rows=64, gradient_checkpointing=recompute))
    engine.model.chunk_elements = chunk_elements
    ids = torch.randint(1, 32000, (64, 256))
    ones = torch.ones_like(ids)
    rows = DataProto.from_dict(
        {
            "input_ids": ids,
            "responses": ids[:, 64:],
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
            "response_mask": ones[:, 64:],
            "weights": torch.ones(64, 192),
        }
    )
    torch.cuda.reset_peak_memory_stats()
    engine.forward_backward(rows, loss_of)
    return torch.cuda.max_memory_allocated()


def test_recomputation_and_chunks_bound_memory() -> None:
    ways = {"plain": (False, None), "recomputed": (True, None), "chunked": (True, 1 << 22)}
    peaks = run_cases(1, {name: partial(peak_bytes, *way) for name, way in ways.items()}, backend=BACKEND)
    (plain,), (recomputed,), (chunked,) = (peaks[name] for name in ways)
    logits = 64 * 192 * 32000 * 4
    assert recomputed < 0.8 * plain
    assert chunked < recomputed
    assert chunked < logits


def waits(num_rows: int) -> list[int]:
    return waits_of(cuda_engine(WIDE, "lm", Case(rows=num_rows)), DataProto.from_dict(make_batch()))


def test_no_micro_batch_waits_for_the_gpu() -> None:
    places = run_cases(1, {num: partial(waits, num) for num in (1, 8)}, backend=BACKEND)
    assert places[1] == places[8]
