"""What every TrainEngine must hold to, however its work is split over micro-batches and ranks."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rlsys.engines.megatron.engine  # noqa: F401  imported once, before ranks are forked
from rlsys.interfaces import LossSum
from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.protocol import DataProto
from tests.contracts.train_engine import (
    CASES,
    ENGINES,
    EP2,
    EXPERT_CASES,
    MODELS,
    ROWS,
    TEMPERATURE,
    TP2_SP,
    Case,
    Factory,
    collected,
    is_slow,
    loss_of,
    make_batch,
    one_step,
    reference,
    reference_model,
    results,
    share_of,
    waits_of,
)
from tests.engine_gradients import gradients
from tests.ranks import run_ranks

RUNS = [
    ("fsdp", "qwen2-tied", "lm", (1, 2, 4)),
    ("fsdp", "llama-untied", "lm", (2,)),
    ("fsdp", "llama-untied", "scalar", (2,)),
    ("fsdp", "qwen3-window", "lm", (1,)),
    ("megatron", "qwen2-tied", "lm", (1, 2, 4)),
    ("megatron", "llama-untied", "lm", (2,)),
    ("megatron", "llama-untied", "scalar", (2, 4)),
    ("megatron", "qwen3-4-layers", "lm", (2, 4)),
]
SPLITS = [
    pytest.param(
        engine,
        model,
        head,
        world,
        case,
        id=f"{engine}-{model}-{head}-{world}ranks-{case}",
        marks=[pytest.mark.slow] if is_slow(engine, world, case) else [],
    )
    for engine, model, head, worlds in RUNS
    for world, case in CASES[engine]
    if world in worlds
]


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def factory(engine: str) -> Factory:
    return ENGINES[engine]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize(("engine", "model", "head", "world", "case"), SPLITS)
def test_loss_gradients_and_outputs_do_not_depend_on_the_split(
    engine: str, model: str, head: str, world: int, case: Case
) -> None:
    check_step(results(engine, world, model, head, slow=is_slow(engine, world, case))[case], model, head)


def check_step(ranks: list[dict[str, Any]], model: str, head: str) -> None:
    outputs, loss, gradients = reference(model, head)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    for name, expected in outputs.items():
        gradient = collected(ranks, name)
        torch.testing.assert_close(gradient, expected.float(), rtol=1e-5, atol=2e-6)
    for rank in ranks:
        assert rank["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert rank["metrics"]["row_length"] == pytest.approx(7.25)
        assert rank["report"].grad_norm == pytest.approx(norm, rel=1e-5)
        assert rank["gradients"].keys() == gradients.keys()
        far = {name: d for name, g in gradients.items() if (d := distance(rank["gradients"][name], g)) > 1e-5}
        assert not far


@pytest.mark.parametrize(
    ("engine", "model", "world", "case"),
    [
        ("fsdp", "llama-6-heads-3-kv", 2, Case(rows=3, sp_size=2)),
        ("fsdp", "llama-1-kv", 2, Case(rows=3, sp_size=2)),
        ("fsdp", "qwen2-tied", 4, Case(rows=3, sp_size=4)),
        ("fsdp", "gpt-oss", 2, Case(rows=3, sp_size=2)),
        ("fsdp", "qwen3-window", 4, Case(rows=3, sp_size=2, tp_size=2)),
        ("megatron", "llama-1-kv", 2, Case(rows=3, megatron=ParallelSizes(tp=2))),
        ("megatron", "gemma3", 2, Case(rows=3, megatron=ParallelSizes(cp=2))),
        ("megatron", "gemma3", 2, Case(max_tokens=15, megatron=TP2_SP, gradient_checkpointing=True)),
        pytest.param("megatron", "llama-1-kv", 4, Case(rows=3, megatron=TP2_SP), marks=pytest.mark.slow),
    ],
)
def test_sequences_or_heads_over_more_ranks_than_key_value_heads(
    factory: Factory, model: str, world: int, case: Case
) -> None:
    check_step(run_ranks(world, one_step, factory, model, "lm", case), model, "lm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "head", "world", "case"),
    [
        ("llama-biases", "lm", 2, Case(rows=3, tp_size=2)),
        ("llama-untied", "scalar", 4, Case(rows=3, tp_size=2, fsdp_size=2)),
        ("llama-6-heads-3-kv", "lm", 3, Case(rows=3, tp_size=3, packed=False)),
        ("qwen2-tied", "lm", 6, Case(rows=3, tp_size=2)),
        *((model, "lm", 2, Case(rows=3, tp_size=2)) for model in ("gemma3", "granite", "mistral", "olmo2", "phi3")),
    ],
)
def test_fsdp_splits_the_matrices_of_each_family(model: str, head: str, world: int, case: Case) -> None:
    check_step(run_ranks(world, one_step, ENGINES["fsdp"], model, head, case), model, head)


@pytest.mark.parametrize(
    ("model", "world", "case"),
    [
        ("qwen3-4-layers", 2, Case(rows=2, megatron=ParallelSizes(pp=2, vp=2))),
        pytest.param(
            "qwen3-4-layers", 4, Case(rows=2, megatron=ParallelSizes(cp=2, pp=2, vp=2)), marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3-4-layers", 4, Case(rows=1, megatron=ParallelSizes(tp=2, pp=2, vp=2)), marks=pytest.mark.slow
        ),
    ],
)
def test_interleaved_stages(model: str, world: int, case: Case) -> None:
    check_step(run_ranks(world, one_step, ENGINES["megatron"], model, "lm", case), model, "lm")


@pytest.mark.parametrize(
    ("model", "world", "case"),
    [
        pytest.param(*entry, id=f"{entry[0]}-{entry[1]}ranks-{entry[2]}", marks=[pytest.mark.slow] * (number > 7))
        for number, entry in enumerate(EXPERT_CASES)
    ],
)
def test_experts_and_latent_attention_over_ranks(model: str, world: int, case: Case) -> None:
    check_step(run_ranks(world, one_step, ENGINES["megatron"], model, "lm", case), model, "lm")


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_step_is_adamw_on_the_clipped_mean_gradient(engine: str, world: int) -> None:
    model = reference_model("qwen2-tied", "lm")
    _, _, gradients = reference("qwen2-tied", "lm")
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    assert norm > 1.0, "the case must clip"
    for rank in results(engine, world, "qwen2-tied", "lm")[Case(rows=3)]:
        assert rank["report"].grad_norm == pytest.approx(norm, rel=1e-5)
        assert (rank["report"].applied, rank["report"].lr) == (True, 1e-3)
        for name, parameter in model.named_parameters():
            g = gradients[name] / (norm + 1e-6)
            expected = parameter.detach() * (1 - 1e-3 * 0.01) - 1e-3 * g / (g.abs() + 1e-8)
            clear = g.abs() > 1e-6  # where Adam's first step, close to a sign, does not hang on the last digits
            assert clear.any()
            torch.testing.assert_close(rank["weights"][name][clear].double(), expected[clear], rtol=0, atol=2e-6)


def waits(factory: Factory, model: str, case: Case) -> list[list[list[str]]]:
    engines = [factory(MODELS[model], "lm", replace(case, rows=rows)) for rows in (ROWS, 2)]
    return [waits_of(engine, my_rows(engine)) for engine in engines]


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        ("fsdp", Case(sp_size=2, gradient_checkpointing=True)),
        ("megatron", Case()),
        ("megatron", Case(megatron=TP2_SP, gradient_checkpointing=True)),
        ("megatron", Case(megatron=ParallelSizes(cp=2))),
    ],
)
def test_no_micro_batch_waits_for_the_device(factory: Factory, case: Case) -> None:
    for whole_batch, one_by_one in run_ranks(2, waits, factory, "qwen2-tied", case):
        assert one_by_one == whole_batch
        assert all("rlsys/engines/base.py" in place for called in whole_batch for place in called)


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in engine.weights(1 << 12) for name, tensor in bucket}


def my_rows(engine: Any) -> DataProto:
    return DataProto.from_dict(make_batch())[share_of(engine.dp_rank, engine.dp_size)]


def train(engine: Any, rows: DataProto, loss: Any = loss_of) -> Any:
    engine.forward_backward(rows, loss, outputs=("log_probs",), temperature=TEMPERATURE)
    return engine.optim_step()


def poisoned(outputs: Any, rows: Any) -> LossSum:
    """NaN on the rank that holds the first row of the batch."""
    good = loss_of(outputs, rows)
    first = make_batch()["input_ids"][0]
    bad = any(torch.equal(row, first) for row in rows["input_ids"])
    return LossSum(good.total * math.nan, good.count) if bad else good


def uncounted(outputs: Any, rows: Any) -> LossSum:
    return LossSum(torch.zeros(()), 0.0)


def refusal(factory: Factory) -> dict[str, Any]:
    engine, plain = (factory(MODELS["qwen2-tied"], "lm", Case(rows=2)) for _ in range(2))
    rows, before = my_rows(engine), whole(engine)
    reports = [train(engine, rows, poisoned), train(engine, rows, uncounted)]
    untouched = all(torch.equal(before[name], tensor) for name, tensor in whole(engine).items())
    after = [(train(e, rows), train(e, rows), whole(e)) for e in (engine, plain)]
    same = all(torch.equal(tensor, after[1][2][name]) for name, tensor in after[0][2].items())
    return {"reports": reports, "untouched": untouched, "same": same, "equal": after[0][:2] == after[1][:2]}


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_without_a_finite_gradient_or_a_count_changes_nothing(factory: Factory, world: int) -> None:
    for result in run_ranks(world, refusal, factory):
        assert [report.applied for report in result["reports"]] == [False, False]
        assert math.isnan(result["reports"][0].grad_norm)
        assert result["untouched"]
        assert result["same"], "the steps after a refused one differ from those of an engine that never had it"
        assert result["equal"]


def scaled_update(factory: Factory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and the first step of AdamW without decay, times eps: lr g / (|g| + eps) is proportional to g."""
    engine = factory(MODELS["llama-untied"], "lm", Case(rows=2, lr=10.0, eps=100.0))
    before = whole(engine)
    engine.forward_backward(my_rows(engine), loss_of, outputs=("log_probs",), temperature=TEMPERATURE)
    before_step = gradients(engine)
    engine.optim_step()
    return before_step, {name: before[name] * (1 - 10 * 0.01) - tensor for name, tensor in whole(engine).items()}


def test_eps_is_added_to_adamws_denominator(factory: Factory) -> None:
    ((grads, update),) = run_ranks(1, scaled_update, factory)
    for name, gradient in grads.items():
        assert distance(update[name] / update[name].norm(), gradient / gradient.norm()) < 1e-2


def accumulation(factory: Factory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = factory(MODELS["llama-untied"], "lm", Case(rows=2))
    rows = my_rows(engine)
    options: dict[str, Any] = {"outputs": ("log_probs",), "temperature": TEMPERATURE}
    engine.forward_backward(rows, loss_of, **options)
    at_once = gradients(engine)
    engine.optim_step()
    engine = factory(MODELS["llama-untied"], "lm", Case(rows=2))
    for part in (rows[:1], rows[1:]):
        engine.forward_backward(part, loss_of, **options)
    return at_once, gradients(engine)


def test_gradients_add_up_over_calls(factory: Factory) -> None:
    for at_once, in_parts in run_ranks(2, accumulation, factory):
        assert all(distance(in_parts[name], gradient) < 1e-5 for name, gradient in at_once.items())


def held(factory: Factory, model: str, head: str, case: Case) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    engine = factory(MODELS[model], head, case)
    engine.forward(my_rows(engine), ("log_probs",) if head == "lm" else ("values",))
    local = {name: tensor.clone() for name, tensor in engine.local_tensors().items()}
    return engine.weight_layout(), local, whole(engine)


@pytest.mark.parametrize(
    ("engine", "model", "head", "world", "case", "copies"),
    [
        ("fsdp", "qwen2-tied", "lm", 1, Case(rows=1), {1}),
        ("fsdp", "qwen2-tied", "lm", 4, Case(rows=1), {1}),
        ("fsdp", "llama-untied", "scalar", 4, Case(rows=1, fsdp_size=2), {2}),
        ("fsdp", "llama-untied", "scalar", 3, Case(rows=1), {1}),
        ("fsdp", "qwen2-tied", "lm", 4, Case(rows=1, tp_size=2), {1, 2}),
        pytest.param("fsdp", "qwen3-window", "lm", 6, Case(rows=1, tp_size=2), {1, 2}, marks=pytest.mark.slow),
        ("megatron", "qwen2-tied", "lm", 1, Case(rows=1), {1}),
        ("megatron", "qwen2-tied", "lm", 2, Case(rows=1, megatron=ParallelSizes(pp=2)), {1, 2}),
        ("megatron", "llama-untied", "scalar", 2, Case(rows=1, megatron=ParallelSizes(tp=2)), {1, 2}),
        ("megatron", "qwen2-tied", "lm", 2, Case(rows=1, megatron=ParallelSizes(cp=2)), {2}),
    ],
)
def test_the_layout_covers_every_element_and_says_where_it_is(
    factory: Factory, model: str, head: str, world: int, case: Case, copies: set[int]
) -> None:
    ranks = run_ranks(world, held, factory, model, head, case)
    full = ranks[0][2]
    expected = dict(reference_model(model, head).named_parameters())
    assert full.keys() == expected.keys() == ranks[0][0].full_shapes.keys()
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in full.items()}
    for number, (layout, local, _) in enumerate(ranks):
        assert layout.rank == number
        assert layout.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if model.endswith("-tied") else {})
        for shard in layout.shards:
            box = tuple(slice(s, s + n) for s, n in zip(shard.box.start, shard.box.shape, strict=True))
            at = tuple(slice(s, s + n) for s, n in zip(shard.local_start, shard.box.shape, strict=True))
            assert torch.equal(full[shard.box.tensor][box], local[shard.local][at])
            seen[shard.box.tensor][box] += 1
            assert layout.dtypes[shard.box.tensor] == "float32"
    assert {int(n) for count in seen.values() for n in count.unique()} == copies
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in full.items())


def seed_everything() -> None:
    """A state of the generators that a process which only loads the checkpoint does not have."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(12345)
    torch.rand(5), random.random(), np.random.standard_normal()


def resumed(factory: Factory, place: Path, first: Case, second: Case | None, model: str = "qwen2-tied") -> list[Any]:
    """Two steps, a checkpoint, two more; or, when it is there, the two after it."""
    engine = factory(MODELS[model], "lm", second or first)
    rows = my_rows(engine)
    if second is None:
        seed_everything()
        for _ in range(2):
            train(engine, rows)
        engine.save(place / "step_2", "resume")
    else:
        engine.load(place / "step_2")
    draws = [torch.rand(3).tolist(), random.random(), float(np.random.rand())]
    return [train(engine, rows), train(engine, rows), whole(engine), draws]


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(factory: Factory, world: int, tmp_path: Path) -> None:
    first = run_ranks(world, resumed, factory, tmp_path, Case(rows=2), None)
    second = run_ranks(world, resumed, factory, tmp_path, Case(rows=2), Case(rows=2))
    for a, b in zip(first, second, strict=True):
        assert a[:2] == b[:2]
        assert all(torch.equal(tensor, b[2][name]) for name, tensor in a[2].items())
        assert a[3] == b[3], "the random generators were not restored"


def stepped(factory: Factory, case: Case, place: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """Two steps before a checkpoint, and one of an engine that continues from it."""
    engine, again = (factory(MODELS["qwen2-tied"], "lm", case) for _ in range(2))
    reports = [train(engine, my_rows(engine)) for _ in range(2)]
    engine.save(place, "resume")
    again.load(place)
    return [*reports, train(again, my_rows(again))], whole(again)


@pytest.mark.parametrize("world", [1, 2])
def test_steps_on_the_host_are_those_of_the_device(factory: Factory, world: int, tmp_path: Path) -> None:
    device, host = (
        run_ranks(world, stepped, factory, Case(rows=2, moments_on_host=on_host), tmp_path / str(on_host))
        for on_host in (False, True)
    )
    for (reports, weights), (host_reports, host_weights) in zip(device, host, strict=True):
        assert [report.grad_norm for report in host_reports] == pytest.approx([r.grad_norm for r in reports], rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(host_weights[name], tensor, rtol=0, atol=2e-6)


DP2, TP2PP2 = Case(rows=2), Case(rows=2, megatron=ParallelSizes(tp=2, pp=2))
OTHER_RANKS = [
    ("fsdp", DP2, 1, Case(rows=3)),
    ("fsdp", DP2, 4, Case(rows=1)),
    ("fsdp", DP2, 4, Case(rows=2, fsdp_size=2)),
    ("fsdp", Case(rows=2, tp_size=2), 4, Case(rows=2, tp_size=2)),
    pytest.param("fsdp", DP2, 4, Case(rows=2, tp_size=2), marks=pytest.mark.slow),
    pytest.param("fsdp", Case(rows=2, tp_size=2), 1, Case(rows=3), marks=pytest.mark.slow),
    ("megatron", DP2, 2, Case(rows=2, megatron=ParallelSizes(tp=2))),
    ("megatron", DP2, 2, Case(rows=2, megatron=ParallelSizes(cp=2))),
    ("megatron", DP2, 1, Case(rows=3)),
    pytest.param("megatron", TP2PP2, 4, Case(rows=2, megatron=ParallelSizes(tp=4)), marks=pytest.mark.slow),
    pytest.param("megatron", TP2PP2, 2, DP2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "first", "world", "case"), OTHER_RANKS)
def test_a_checkpoint_loads_on_another_number_of_ranks(
    factory: Factory, first: Case, world: int, case: Case, tmp_path: Path
) -> None:
    uninterrupted = run_ranks(4 if first is TP2PP2 else 2, resumed, factory, tmp_path, first, None)[0]
    for other in run_ranks(world, resumed, factory, tmp_path, first, case):
        for name, tensor in uninterrupted[2].items():
            torch.testing.assert_close(other[2][name], tensor, rtol=0, atol=2e-6)
        assert [r.grad_norm for r in other[:2]] == pytest.approx([r.grad_norm for r in uninterrupted[:2]], rel=1e-4)


@pytest.mark.parametrize(
    ("writer", "reader", "model"),
    [
        ("fsdp", "megatron", "qwen2-tied"),
        ("megatron", "fsdp", "qwen2-tied"),
        ("fsdp", "megatron", "qwen3-moe"),
        ("megatron", "fsdp", "mixtral"),
    ],
)
def test_an_engine_loads_what_another_one_saved(writer: str, reader: str, model: str, tmp_path: Path) -> None:
    uninterrupted = run_ranks(2, resumed, ENGINES[writer], tmp_path, DP2, None, model)[0]
    sizes = Case(rows=2, megatron=ParallelSizes(tp=2) if model == "qwen2-tied" else EP2)
    for other in run_ranks(2, resumed, ENGINES[reader], tmp_path, DP2, sizes if reader == "megatron" else DP2, model):
        for name, tensor in uninterrupted[2].items():
            torch.testing.assert_close(other[2][name], tensor, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [ParallelSizes(tp=2, pp=2), TP2_SP, ParallelSizes(cp=2)])
def test_a_resumed_run_of_parts_is_bitwise_the_uninterrupted_one(sizes: ParallelSizes, tmp_path: Path) -> None:
    case = Case(rows=2, megatron=sizes)
    first = run_ranks(4, resumed, ENGINES["megatron"], tmp_path, case, None)
    second = run_ranks(4, resumed, ENGINES["megatron"], tmp_path, case, case)
    for a, b in zip(first, second, strict=True):
        assert a[:2] == b[:2]
        assert all(torch.equal(tensor, b[2][name]) for name, tensor in a[2].items())
