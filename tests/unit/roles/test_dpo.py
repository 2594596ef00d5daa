"""DPO, IPO and KTO as a role: the documented formulas on whole responses, padding, learning."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tests.tiny_engine as tiny
from rlsys.config.schema.jobs import DPOLossConfig
from rlsys.protocol import DataProto
from rlsys.roles.dpo import DPOEngine
from rlsys.roles.lm import mean_over_ranks


def tensors(batch: DataProto) -> Any:
    assert batch.batch is not None
    return batch.batch


def log_probs(model: tiny.TinyModel, rows: Any) -> Tensor:
    """Sums over the responses (B,), by the whole softmax."""
    width = rows["responses"].shape[1]
    hidden = model(rows["input_ids"], rows["attention_mask"], rows["position_ids"])[:, -width - 1 : -1]
    each = (hidden @ model.head.T).log_softmax(-1).gather(2, rows["responses"].unsqueeze(2)).squeeze(2)
    return (each * rows["response_mask"]).sum(1)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("micro_rows", [1, 3, 8])
def test_a_step_is_that_of_the_documented_formula_though_pairs_are_split(loss_type: Any, micro_rows: int) -> None:
    engine, reference, batch = tiny.TinyEngine(micro_rows=micro_rows), tiny.TinyEngine(seed=1), tiny.make_batch()
    rows, beta = tensors(batch), 0.3
    sums = log_probs(engine.model, rows)
    ratio = sums - log_probs(reference.model, rows).detach()
    if loss_type == "ipo":
        ratio = ratio / rows["response_mask"].sum(1)
    logits = ratio[0::2] - ratio[1::2]
    losses = {"sigmoid": -torch.nn.functional.logsigmoid(beta * logits), "ipo": (logits - 1 / (2 * beta)) ** 2}
    loss = losses[loss_type].mean()
    (gradient,) = torch.autograd.grad(loss, [engine.model.head])
    metrics = DPOEngine(engine, DPOLossConfig(loss_type=loss_type, beta=beta), reference).train_batch(batch)
    torch.testing.assert_close(engine.gradients[0]["head"], gradient)
    assert not reference.gradients
    rewards = beta * ratio.detach()
    expected = {
        "loss": loss,
        "rewards/chosen": rewards[0::2].mean(),
        "rewards/rejected": rewards[1::2].mean(),
        "rewards/margins": (rewards[0::2] - rewards[1::2]).mean(),
        "rewards/accuracies": (rewards[0::2] > rewards[1::2]).double().mean(),
        "logps/chosen": sums[0::2].mean(),
        "logps/rejected": sums[1::2].mean(),
    }
    for name, value in expected.items():
        assert metrics[f"train/{name}"] == pytest.approx(value.item(), rel=1e-9), name


def test_the_policy_comes_to_prefer_the_chosen_responses() -> None:
    engine, batch = tiny.TinyEngine(lr=1.0), tiny.make_batch(16)
    role = DPOEngine(engine, DPOLossConfig(beta=0.5), tiny.TinyEngine())
    start = mean_over_ranks([role.evaluate(batch)])
    assert start["val/rewards/margins"] == start["val/rewards/accuracies"] == 0
    for _ in range(20):
        role.train_batch(batch)
    measured = mean_over_ranks([role.evaluate(batch)])
    assert measured["val/rewards/accuracies"] == 1
    assert measured["val/loss"] < 0.4 < start["val/loss"]


def test_padding_pairs_do_not_count() -> None:
    batch = tiny.make_batch()
    padded = DataProto.concat([batch, tiny.make_batch(2)])
    tensors(padded)["response_mask"][-2:] = 0
    role = DPOEngine(tiny.TinyEngine(), DPOLossConfig(), tiny.TinyEngine(seed=1))
    expected = mean_over_ranks([role.evaluate(batch)])
    assert mean_over_ranks([role.evaluate(padded)]) == pytest.approx(expected)
