"""Estimators and losses written for verl, registered as they are, against our own of the same formula."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.algorithms import advantage, policy_loss
from rlsys.algorithms.core_algos import agg_loss, register_adv_est, register_policy_loss
from rlsys.algorithms.objective import actor_loss
from rlsys.algorithms.stages import compute_advantage
from rlsys.config.schema.actor import ActorConfig, PolicyLossConfig
from rlsys.config.schema.algorithm import AlgorithmConfig
from rlsys.protocol import DataProto


@pytest.fixture(autouse=True)
def separate_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (policy_loss._LOSSES, advantage._ESTIMATORS):
        monkeypatch.setattr(registry, "_functions", dict(registry._functions))


def group_means(token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs):
    """GRPO in the manner of verl's plug-ins: a loop over uids, the section by `get`."""
    assert set(kwargs) >= {"group_ids", "gamma"}
    scores, groups = token_level_rewards.sum(-1), defaultdict(list)
    for row, uid in enumerate(index):
        groups[uid].append(scores[row])
    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    means = {uid: torch.stack(values).mean() for uid, values in groups.items()}
    stds = {uid: torch.stack(values).std() + epsilon if by_std else 1.0 for uid, values in groups.items()}
    advantages = torch.stack([(scores[i] - means[uid]) / stds[uid] for i, uid in enumerate(index)])
    return advantages.unsqueeze(-1) * response_mask, advantages.unsqueeze(-1) * response_mask


@pytest.mark.parametrize("by_std", [True, False])
def test_an_estimator_of_verls_signature_gives_what_ours_gives(by_std: bool) -> None:
    register_adv_est("verl_grpo")(group_means)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    batch = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])},
        {"uid": np.array(["b", "a", "b", "a"], dtype=object)},
    )
    theirs, ours = (
        compute_advantage(batch, AlgorithmConfig(adv_estimator=name, norm_adv_by_std_in_grpo=by_std))
        for name in ("verl_grpo", "grpo")
    )
    torch.testing.assert_close(theirs.tensors["advantages"], ours.tensors["advantages"])


def clipped(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
            rollout_is_weights=None):  # fmt: skip
    """PPO's clip in the manner of verl's plug-ins."""
    ratio = torch.exp(log_prob - old_log_prob)
    low, high = config.clip_ratio_low, config.get("clip_ratio_high", 0.2)
    assert config["policy_loss"].get("loss_mode") in ("verl_clip", "verl_old_clip")
    assert config.policy_loss.get("no_such_key", 3) == 3
    losses = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high))
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    share = ((ratio > 1 + high) * response_mask).sum() / response_mask.sum()
    return loss, {"actor/share": share.item()}


def older(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    loss, metrics = clipped(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    return loss, torch.tensor(metrics["actor/share"]), torch.tensor(0.25), torch.tensor(0.0)


def rows(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(6, 5, generator=draw) > 0.3).long()
    mask[:, 0] = 1
    values = {
        n: torch.randn(6, 5, generator=draw, dtype=torch.float64) for n in ("log_prob", "old_log_prob", "advantages")
    }
    return values | {"response_mask": mask}


def config(loss_mode: str, loss_agg_mode: Any = "token-mean") -> ActorConfig:
    loss = PolicyLossConfig(loss_mode=loss_mode)
    return ActorConfig(policy_loss=loss, loss_agg_mode=loss_agg_mode, clip_ratio_c=1e6, clip_ratio_high=0.3)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("name", "function"), [("verl_clip", clipped), ("verl_old_clip", older)])
def test_a_loss_of_verls_signature_trains_as_ours_however_rows_are_split(
    name: str, function: Any, mode: str, weighted: bool
) -> None:
    register_policy_loss(name)(function)
    inputs = rows()
    if weighted:
        inputs["rollout_is_weights"] = torch.rand(6, 5, dtype=torch.float64)
    inputs["log_prob"].requires_grad_()

    def loss_and_gradient(loss_mode: str, parts: list[slice]) -> tuple[Tensor, Tensor]:
        results = [actor_loss(config(loss_mode, mode), **{k: v[p] for k, v in inputs.items()}) for p in parts]
        loss = sum(r.total for r in results) / sum(r.count for r in results)
        return loss, torch.autograd.grad(loss, inputs["log_prob"])[0]

    expected = loss_and_gradient("vanilla", [slice(0, 6)])
    for parts in ([slice(0, 6)], [slice(0, 2), slice(2, 6)]):
        loss, gradient = loss_and_gradient(name, parts)
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(gradient, expected[1])


def test_metrics_of_both_forms_are_means_over_tokens() -> None:
    register_policy_loss("verl_clip")(clipped)
    register_policy_loss("verl_old_clip")(older)
    inputs = rows()
    tokens = float(inputs["response_mask"].sum())
    ratio = (inputs["log_prob"] - inputs["old_log_prob"]).exp()
    high = float(((ratio > 1.3) * inputs["response_mask"]).sum())
    new = actor_loss(config("verl_clip"), **inputs).metrics
    assert new["actor/share"] == pytest.approx((high, tokens))
    old = actor_loss(config("verl_old_clip"), **inputs).metrics
    assert old["actor/pg_clipfrac"] == pytest.approx((high, tokens))
    assert old["actor/ppo_kl"] == pytest.approx((0.25 * tokens, tokens))


def test_what_does_not_fit_is_refused_by_name() -> None:
    register_policy_loss("verl_clip")(clipped)
    with pytest.raises(ValueError, match=r"clipped .*token-sum"):
        actor_loss(config("verl_clip", "token-sum"), **rows())
    with pytest.raises(ValueError, match="requires 'prompts'"):
        register_adv_est("verl_other")(lambda token_level_rewards, response_mask, prompts, **kwargs: None)
    with pytest.raises(ValueError, match="'args' must be a keyword argument"):
        register_adv_est("verl_other")(lambda *args: None)


def test_the_scalar_loss_takes_a_constant_and_is_0_without_tokens() -> None:
    losses, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    assert agg_loss(losses, mask, "seq-mean-token-sum-norm", loss_scale_factor=10).item() == pytest.approx(6 / 2 / 10)
    assert agg_loss(losses, torch.zeros_like(mask), "token-mean").item() == 0
