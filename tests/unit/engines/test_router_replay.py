"""Router replay in MegatronEngine: the same experts in every layout, and gradients as if they had been chosen."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.models.megatron.parallel import ParallelSizes
from rlsys.protocol import DataProto
from tests.contracts.train_engine import MODELS, Case, loss_of, make_batch, megatron_engine, share_of
from tests.engine_gradients import gradients
from tests.ranks import run_ranks

MODEL = {**MODELS["qwen3-moe"], "num_hidden_layers": 4, "mlp_only_layers": [1]}
ALONE = Case(rows=3, gradient_checkpointing=True)
LAYOUTS = [
    Case(rows=1, megatron=ParallelSizes(pp=2, vp=2, ep=2), gradient_checkpointing=True),
    Case(max_tokens=15, megatron=ParallelSizes(tp=2, cp=2, ep=2, etp=1, sequence_parallel=True)),
]


def given_routes() -> Tensor:
    """Two different experts of every real token and layer, but none for some tokens."""
    mask = make_batch()["attention_mask"]
    draw = torch.Generator().manual_seed(7)
    routes = torch.rand(*mask.shape, 4, 4, generator=draw).argsort(-1)[..., :2]
    unknown = (mask == 0) | (torch.rand(mask.shape, generator=draw) < 0.2)
    return routes.masked_fill(unknown[..., None, None], -1).to(torch.int16)


def passes(case: Case) -> dict[str, Any]:
    """Recorded routes, and the outputs, gradients and metric of passes that take given ones."""
    engine = megatron_engine(MODEL, "lm", case)
    share = share_of(engine.dp_rank, engine.dp_size)
    rows = DataProto.from_dict(make_batch())[share]
    result = engine.forward(rows, ("log_probs", "routed_experts"))
    result |= {"collect": engine.is_collect}
    for name, routes in (("again", result["routed_experts"]), ("given", given_routes()[share])):
        replayed = DataProto.from_dict({**rows.tensors, "routed_experts": routes})
        result[f"{name}_log_probs"] = engine.forward(replayed, ("log_probs",))["log_probs"]
        metrics = engine.forward_backward(replayed, loss_of)
        result |= {f"{name}_gradients": gradients(engine), f"{name}_differ": metrics["actor/routes_differ"]}
        engine.optimizer.zero_grad()
        engine._count = 0.0
    engine.forward_backward(rows, loss_of)
    return {**result, "gradients": gradients(engine)}


def all_passes(cases: list[Case]) -> list[dict[str, Any]]:
    return [passes(case) for case in cases]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    ((result,),) = run_ranks(1, all_passes, [ALONE])
    return result


def close(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_a_replay_of_what_was_recorded_changes_nothing(alone: dict[str, Any]) -> None:
    recorded, mask = alone["routed_experts"], make_batch()["attention_mask"].bool()
    assert (recorded[mask][:, [0, 2, 3]] >= 0).all()
    assert (recorded[mask][:, 1] == -1).all(), "the dense layer has no routes"
    assert (recorded[~mask] == -1).all()
    close(alone["again_log_probs"], alone["log_probs"])
    close(alone["again_gradients"], alone["gradients"])
    assert alone["again_differ"] == 0


def test_routers_take_the_experts_that_are_given(alone: dict[str, Any]) -> None:
    assert (alone["given_log_probs"] - alone["log_probs"]).abs().max() > 1e-3
    own, given, known = alone["routed_experts"].long(), given_routes().long(), given_routes()[..., 0, 0] >= 0
    own, given = own[known][:, [0, 2, 3]], given[known][:, [0, 2, 3]]
    first_layer = (given[:, 0, :, None] != own[:, 0, None, :]).all(-1).float().mean()
    assert 0.2 < alone["given_differ"] < 0.8
    assert abs(alone["given_differ"] - float(first_layer)) < 0.25


@pytest.mark.slow
def test_every_layout_takes_the_same_experts(alone: dict[str, Any]) -> None:
    for results in zip(*run_ranks(4, all_passes, LAYOUTS), strict=True):
        for name in ("log_probs", "routed_experts", "again_log_probs", "given_log_probs"):
            close(torch.cat([result[name] for result in results if result["collect"]]), alone[name])
        for name in ("again", "given"):
            assert results[0][f"{name}_differ"] == pytest.approx(alone[f"{name}_differ"])
            close(results[0][f"{name}_gradients"], alone[f"{name}_gradients"])
