"""The roles on FSDPEngine: what they learn does not depend on ranks, micro-batches or packing."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config.schema.actor import ActorConfig, CriticConfig
from rlsys.config.schema.jobs import DPOLossConfig
from rlsys.protocol import DataProto
from rlsys.roles.actor import PPOActor
from rlsys.roles.critic import PPOCritic
from rlsys.roles.dpo import DPOEngine
from rlsys.roles.lm import LMEngine, mean_over_ranks
from rlsys.roles.reward_model import RWEngine
from tests.contracts.train_engine import MODELS, Case, fsdp_engine, make_batch, reference_model
from tests.ranks import run_ranks

MODEL = "llama-untied"
SPLITS = [Case(rows=8), Case(rows=3), Case(max_tokens=20), Case(rows=2, packed=False)]
ROWS = [0, 1, 3, 4, 5, 6]
"""Without the rows of an empty response or an incomplete pair: three real pairs."""
MODES = ["token-mean", "token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def batch_of(rank: int, ranks: int) -> DataProto:
    """This rank's share; pairs stay together (4 + 2 rows on two ranks)."""
    held = {name: values[ROWS] for name, values in make_batch().items()}
    weights = held["weights"] * held["response_mask"]
    held |= {"advantages": weights, "returns": weights, "old_log_probs": weights.abs().neg() - 4, "values": 0 * weights}
    held["is_desirable"] = torch.tensor([True, True, False, False, True, True])
    bounds = {1: [0, 6], 2: [0, 4, 6]}[ranks]
    return DataProto.from_dict(held, meta_info={"temperature": 0.7})[bounds[rank] : bounds[rank + 1]]


def updates(head: str) -> dict[str, dict[str, float]]:
    """Metrics of every role's first update, by role and split; runs on each rank."""
    metrics = {}
    for case in SPLITS:
        for name, role in _roles(head).items():
            engine = fsdp_engine(MODELS[MODEL], head, case)
            metrics[f"{name} {case}"] = role(engine, batch_of(engine.dp_rank, engine.dp_size))
    return metrics


def _roles(head: str) -> dict[str, Any]:
    if head == "scalar":
        return {"critic": lambda e, b: PPOCritic(e, CriticConfig()).ppo_update(b), "rm": lambda e, b: reward(e, b)}
    actors = {
        f"actor {mode}": lambda e, b, mode=mode: PPOActor(
            e, ActorConfig(loss_agg_mode=mode, entropy_coeff=0.1)
        ).ppo_update(b)
        for mode in MODES
    }
    preferences = {name: lambda e, b, name=name: preferred(e, b, name) for name in ("sigmoid", "ipo", "kto")}
    return {"lm": lambda e, b: LMEngine(e).train_lm(b), **actors, **preferences}


def preferred(engine: Any, batch: DataProto, loss_type: Any) -> dict[str, Any]:
    """The second update, when policy and reference differ."""
    reference = fsdp_engine(MODELS[MODEL], "lm", SPLITS[0])
    role = DPOEngine(engine, DPOLossConfig(loss_type=loss_type, beta=0.5), reference)
    role.train_batch(batch)
    measured = role.evaluate(batch)
    return {**role.train_batch(batch), "measured": measured}


def reward(engine: Any, batch: DataProto) -> dict[str, Any]:
    model = RWEngine(engine)
    scored, measured = model.score(batch).batch, model.evaluate_rw(batch)
    assert scored is not None
    return {**model.train_rw(batch), "scores": scored["rm_scores"].sum(1).tolist(), "measured": measured}


@cache
def results(world: int, head: str) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(world, updates, head)


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name, value in a.items():
        if name not in ("scores", "measured"):
            assert b[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_updates_do_not_depend_on_ranks_or_splits(head: str) -> None:
    (alone,) = results(1, head)
    expected = {key.split(f" {SPLITS[0]}")[0]: value for key, value in alone.items() if str(SPLITS[0]) in key}
    for rank in (alone, *results(2, head)):
        for key, metrics in rank.items():
            same(expected[key.rpartition(" ")[0]], metrics)


def test_reward_model_is_bradley_terry_on_the_last_token() -> None:
    model = reference_model(MODEL, "scalar")
    scores: list[Tensor] = []
    batch = {name: values[ROWS] for name, values in make_batch().items()}
    for row in range(len(ROWS)):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        scores.append(model(ids[None]).logits[0, -1, 0])
    margin = torch.stack(scores)[0::2] - torch.stack(scores)[1::2]
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    model.zero_grad()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    key = f"rm {SPLITS[1]}"
    ranks = results(2, "scalar")
    assert [x for rank in ranks for x in rank[key]["scores"]] == pytest.approx([s.item() for s in scores], rel=1e-4)
    for rank in ranks:
        assert rank[key]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert rank[key]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    measured = mean_over_ranks([rank[key]["measured"] for rank in ranks])
    assert measured["val/loss"] == pytest.approx(loss.item(), rel=1e-5)
