"""What the controller calls, on real DataProtos."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.algorithms.filters import pf_ppo_rows
from rlsys.algorithms.kl import KLController
from rlsys.algorithms.stages import (
    add_selected_tokens,
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantage,
    filter_groups,
    is_truncated,
    rewards_from_scores,
    shape_batch_rewards,
)
from rlsys.config.schema.actor import ActorConfig, PolicyLossConfig
from rlsys.config.schema.algorithm import (
    AlgorithmConfig,
    KLControlConfig,
    NormConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from rlsys.config.vocabulary import ADV_ESTIMATORS
from rlsys.protocol import DataProto
from rlsys.utils.errors import ConfigError

EOS = 2


def make(rows: int = 4, tokens: int = 3, **columns: Any) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[1, 2:] = 0
    scores = torch.zeros(rows, tokens)
    scores[torch.arange(rows), mask.sum(1) - 1] = torch.tensor([1.0, 0.0, 0.5, 0.25])
    responses = torch.full((rows, tokens), 7)
    responses[0, 2] = EOS
    responses[1, 1] = EOS

    def normal() -> Tensor:
        return torch.randn(rows, tokens, generator=draw) * mask

    tensors = {
        "responses": responses,
        "response_mask": mask,
        "token_level_scores": scores,
        "old_log_probs": -normal().abs(),
        "ref_log_prob": -normal().abs(),
        "rollout_log_probs": -normal().abs(),
        "values": normal(),
        "sum_pi_squared": normal().abs(),
        "reward_baselines": torch.zeros(rows),
    }
    non_tensors = {
        "uid": np.array(["b", "a", "b", "a"], dtype=object),
        "acc": np.array([1, 0, 1, 0], dtype=object),
        "part": np.array([1.0, 0.0, 0.0, 1.0], dtype=object),
    }
    return DataProto.from_dict({**tensors, **columns}, non_tensors)


def advantages_of(batch: DataProto, estimator: str, *, num_repeat: int = 1, seed: int = 0, **keys: Any) -> DataProto:
    config = AlgorithmConfig(adv_estimator=estimator, **keys)
    return compute_advantage(batch, config, num_repeat=num_repeat, seed=seed)


def values(batch: DataProto, name: str) -> Tensor:
    assert batch.batch is not None
    return batch.batch[name]


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_every_estimator_runs_on_a_batch(name: str) -> None:
    batch = rewards_from_scores(make())
    done = advantages_of(batch, name, gdpo_reward_keys=("acc", "part"), gdpo_reward_weights=(1.0, 0.5))
    assert torch.isfinite(values(done, "advantages")).all()
    assert (values(done, "returns")[1, 2:] == 0).all()
    assert "advantages" not in batch.batch.keys()  # noqa: SIM118


def test_an_estimator_must_return_a_number_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(4)
    monkeypatch.setattr("rlsys.algorithms.stages.call_adv_estimator", lambda name, inputs: (rows, rows))
    with pytest.raises(ConfigError, match=r"adv_estimator=grpo returned \[\(4,\), \(4,\)\], not two of \(4, \d\)"):
        advantages_of(rewards_from_scores(make()), "grpo")


def test_groups_follow_uid_or_else_position() -> None:
    batch = rewards_from_scores(make())
    by_uid = advantages_of(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert values(by_uid, "advantages")[:, 0].tolist() == pytest.approx([0.25, -0.125, -0.25, 0.125])
    del batch.non_tensor_batch["uid"]
    by_place = advantages_of(batch, "grpo", norm_adv_by_std_in_grpo=False, num_repeat=2)
    assert values(by_place, "advantages")[:, 0].tolist() == pytest.approx([0.5, -0.5, 0.125, -0.125])


@pytest.mark.parametrize(
    ("estimator", "missing"),
    [
        ("gae", "values"),
        ("remax", "reward_baselines"),
        ("optimal_token_baseline", "sum_pi_squared"),
        ("gdpo", "gdpo_reward_keys"),
        ("grop", "did you mean"),
    ],
)
def test_what_is_missing_is_named(estimator: str, missing: str) -> None:
    batch = rewards_from_scores(make())
    batch.pop(batch_keys=["values", "reward_baselines", "sum_pi_squared"])
    with pytest.raises(ValueError, match=missing):
        advantages_of(batch, estimator)
    with pytest.raises(ValueError, match="token_level_rewards"):
        advantages_of(make(), "grpo")
    batch.non_tensor_batch["style"] = np.array([1.0, None, 0.0, 1.0], dtype=object)
    for key in ("style", "other"):
        with pytest.raises(ConfigError, match=f"gdpo_reward_keys={key} is not a number of every .* from acc"):
            advantages_of(batch, "gdpo", gdpo_reward_keys=(key,))


def test_an_estimator_without_groups_takes_rows_one_by_one() -> None:
    batch = rewards_from_scores(make(row_weights=torch.full((4,), 0.5)))
    plain = values(advantages_of(batch, "gae"), "returns")
    batch.meta_info["rows_per_episode"] = 2
    assert torch.equal(values(advantages_of(batch, "gae"), "returns"), plain)


def test_the_weights_of_gdpo_weigh_its_parts() -> None:
    batch = rewards_from_scores(make())
    batch.non_tensor_batch["acc"] = np.array([1, 1, 0, 0], dtype=object)
    keys: dict[str, Any] = {"gdpo_reward_keys": ("acc", "part"), "adv_norm": NormConfig(std_level="batch", eps=1e-9)}
    second, part = (
        values(advantages_of(batch, "gdpo", **(keys | changed)), "advantages")
        for changed in ({"gdpo_reward_weights": (0.0, 3.0)}, {"gdpo_reward_keys": ("part",)})
    )
    torch.testing.assert_close(second, part)
    both = values(advantages_of(batch, "gdpo", **keys), "advantages")
    ones = values(advantages_of(batch, "gdpo", **keys, gdpo_reward_weights=(1.0, 1.0)), "advantages")
    assert torch.equal(both, ones)
    assert not torch.allclose(both, part)


def test_adv_norm_replaces_the_whitening_of_gae() -> None:
    batch = rewards_from_scores(make())
    whitened = values(advantages_of(batch, "gae"), "advantages")
    centred = values(advantages_of(batch, "gae", adv_norm=NormConfig(mean_level="batch")), "advantages")
    assert not torch.allclose(whitened, centred)
    normed = values(
        advantages_of(batch, "gae", adv_norm=NormConfig(mean_level="batch", std_level="batch", eps=1e-30)), "advantages"
    )
    torch.testing.assert_close(normed, whitened, rtol=1e-5, atol=1e-6)


def test_pf_ppo_resamples_rows_with_everything_that_belongs_to_them() -> None:
    batch = rewards_from_scores(make())
    done = advantages_of(batch, "gae", use_pf_ppo=True, pf_ppo=PFPPOConfig(weight_pow=0.5), seed=3)
    plain = advantages_of(batch, "gae")
    drawn = pf_ppo_rows(torch.tensor([1.0, 0.0, 0.5, 0.25]), PFPPOConfig(weight_pow=0.5), seed=3)
    assert len(set(drawn.tolist())) < 4  # some row is drawn twice
    for name in ("token_level_scores", "advantages", "response_mask"):
        assert torch.equal(values(done, name), values(plain, name)[drawn])
    assert done.non_tensor_batch["uid"].tolist() == plain.non_tensor_batch["uid"][drawn.numpy()].tolist()


def test_kl_penalty_lowers_the_reward_and_moves_the_controller() -> None:
    controller = KLController(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.01, horizon=100))
    batch = make()
    done, metrics = apply_kl_penalty(batch, controller)
    kl = (values(batch, "old_log_probs") - values(batch, "ref_log_prob")) * values(batch, "response_mask")
    torch.testing.assert_close(values(done, "token_level_rewards"), values(batch, "token_level_scores") - 0.1 * kl)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(
        (kl.sum(1) / values(batch, "response_mask").sum(1)).mean().item()
    )
    assert controller.value != 0.1


def test_the_controller_counts_rows_and_not_missing_branches() -> None:
    """Four rows are two episodes of two; the second branch of the second one is missing."""
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    columns = {"old_log_probs": torch.tensor([[-1.0, -1.0]] * 4), "ref_log_prob": torch.tensor([[-1.3, -1.3]] * 4)}
    scores = torch.zeros(4, 2)
    batch = DataProto.from_dict({**columns, "token_level_scores": scores, "response_mask": mask})
    batch.meta_info["rows_per_episode"] = 2
    controller = KLController(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.25, horizon=10))
    done, metrics = apply_kl_penalty(batch, controller)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.3)
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 3 / 10))
    assert done.meta_info == {"rows_per_episode": 2}


def test_a_missing_column_is_named() -> None:
    batch = make()
    batch.pop(batch_keys=["ref_log_prob"])
    with pytest.raises(ValueError, match=r"no 'ref_log_prob', only old_log_probs, response_mask"):
        apply_kl_penalty(batch, KLController(KLControlConfig()))


def test_rollout_correction_adds_weights_and_shrinks_the_mask() -> None:
    batch = make()
    settings = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold="0.3")
    done, metrics = apply_rollout_correction(batch, settings)
    assert values(done, "rollout_is_weights").shape == (4, 3)
    assert values(done, "response_mask").sum() < values(batch, "response_mask").sum()
    assert all(name.startswith("rollout_corr/") for name in metrics)
    rejects = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold="0.3")
    assert "rollout_is_weights" not in apply_rollout_correction(batch, rejects)[0].tensors
    bypass, nothing = apply_rollout_correction(batch, RolloutCorrectionConfig(bypass_mode=True))
    assert torch.equal(values(bypass, "old_log_probs"), values(batch, "rollout_log_probs"))
    assert nothing == {}
    assert apply_rollout_correction(batch, RolloutCorrectionConfig()) == (batch, {})


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "grpo"])
def test_an_outcome_is_kept_where_its_token_is_rejected(estimator: str) -> None:
    batch, rejects = rewards_from_scores(make()), RolloutCorrectionConfig(rollout_rs="token_k1")
    batch.tensors["rollout_log_probs"] = batch.tensors["old_log_probs"].clone()
    batch.tensors["rollout_log_probs"][0, 2] -= 5.0  # the reward of row 0 is there
    batch.tensors["rollout_log_probs"][2, 0] -= 5.0
    corrected, _ = apply_rollout_correction(batch, rejects.model_copy(update={"rollout_rs_threshold": "2.0"}))
    kept = values(corrected, "response_mask")
    assert (kept[0].tolist(), kept[2].tolist()) == ([1, 1, 0], [0, 1, 1])
    whole, less = (advantages_of(rows, estimator, gamma=1.0, lam=1.0) for rows in (batch, corrected))
    assert torch.equal(values(less, "returns"), values(whole, "returns") * kept)
    assert values(whole, "returns")[0].any()


def test_areal_rewards_are_placed_at_the_last_token() -> None:
    batch = make()
    batch.non_tensor_batch["finish_reason"] = np.array(["stop", "stop", "length", "length"], dtype=object)
    done = shape_batch_rewards(batch, AlgorithmConfig(reward_scaling=2.0, mask_no_eos_with_zero=True))
    assert values(done, "token_level_scores").tolist() == [[0, 0, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert shape_batch_rewards(batch, AlgorithmConfig()) is batch


def test_rewards_are_shaped_in_areals_order() -> None:
    """Bias before scaling, clip before norm, truncation last."""

    def shaped(scores: list[float], **keys: Any) -> list[float]:
        tensors = {"token_level_scores": torch.tensor(scores)[:, None], "response_mask": torch.ones(3, 1).long()}
        reasons = np.array(["stop", "stop", "length"], dtype=object)
        batch = DataProto.from_dict(tensors, {"uid": np.array(["a"] * 3, dtype=object), "finish_reason": reasons})
        return values(shape_batch_rewards(batch, AlgorithmConfig(**keys)), "token_level_scores")[:, 0].tolist()

    plain = shaped([1.0, 0.5, 0.0], reward_bias=-0.5, reward_scaling=10.0, reward_clip=4.0)
    assert plain == pytest.approx([4, 0, -4])
    zeroed = shaped([1.0, 1.0, 0.6], reward_norm=NormConfig(mean_level="batch"), mask_no_eos_with_zero=True)
    assert zeroed == pytest.approx([1 - 2.6 / 3, 1 - 2.6 / 3, 0])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"reward_bias": 1.0}, [2, 1, 1.5, 1.25]),
        ({"reward_scaling": 4.0}, [4, 0, 2, 1]),
        ({"reward_clip": 0.75}, [0.75, 0, 0.5, 0.25]),
        ({"reward_norm": NormConfig(mean_level="group")}, [0.5, -0.5, 0.125, -0.125]),
        ({"mask_no_eos_with_zero": True}, [0, 0, 0.5, 0.25]),
    ],
)
def test_every_key_of_the_reward_alone_shapes_it(keys: dict[str, Any], expected: list[float]) -> None:
    batch = make()
    del batch.non_tensor_batch["uid"]
    batch.non_tensor_batch["finish_reason"] = np.array(["length", "stop", "stop", "stop"], dtype=object)
    done = shape_batch_rewards(batch, AlgorithmConfig(**keys), num_repeat=2)
    assert values(done, "token_level_scores").sum(1).tolist() == pytest.approx(expected)


def test_truncation_is_read_from_the_finish_reason() -> None:
    batch = make()
    with pytest.raises(ValueError, match="finish_reason"):
        is_truncated(batch)
    batch.non_tensor_batch["finish_reason"] = np.array(["length", "stop", "stop", "length"], dtype=object)
    assert is_truncated(batch).tolist() == [True, False, False, True]


def test_filter_groups_keeps_rows_in_order() -> None:
    batch = make()
    for metric in ("seq_reward", "seq_final_reward"):
        kept, metrics = filter_groups(batch, metric=metric)
        assert len(kept) == 4
        assert metrics == {"training/filter_groups_kept": 2.0, "training/filter_groups_dropped": 0.0}
    none, metrics = filter_groups(batch, metric="acc")
    assert len(none) == 0
    assert metrics["training/filter_groups_dropped"] == 2
    batch.non_tensor_batch["part"] = np.array([1.0, 0.5, 1.0, 1.0], dtype=object)
    part, _ = filter_groups(batch, metric="part")
    assert part.non_tensor_batch["uid"].tolist() == ["a", "a"]
    assert len(filter_groups(batch, metric="score")[0]) == 4
    batch.non_tensor_batch["text"] = np.array(["a", "b", "c", "d"], dtype=object)
    batch.non_tensor_batch["part"][1] = None
    for metric in ("text", "part", "other"):
        known = "choose from seq_reward, score, seq_final_reward, acc$"
        with pytest.raises(ConfigError, match=rf"filter_groups\.metric={metric} is not a number of every.*{known}"):
            filter_groups(batch, metric=metric)
    batch.non_tensor_batch["episode_end"] = np.array(["stop"] * 4, dtype=object)
    batch.non_tensor_batch["acc"] = np.array([1, 1, 0, 1], dtype=object)
    assert filter_groups(batch, metric="acc")[0].non_tensor_batch["uid"].tolist() == ["b", "b"]


def test_a_group_is_named_by_the_whole_uid() -> None:
    batch = rewards_from_scores(make())
    batch.non_tensor_batch["uid"] = np.array(["m/1", "m/1", "m/2", "m/2"], dtype=object)
    batch.non_tensor_batch["acc"] = np.array([1, 0, 1, 1], dtype=object)
    kept, metrics = filter_groups(batch, metric="acc")
    assert kept.non_tensor_batch["uid"].tolist() == ["m/1", "m/1"]
    assert metrics == {"training/filter_groups_kept": 1.0, "training/filter_groups_dropped": 1.0}
    batch.non_tensor_batch["uid"] = np.array(["a", "b", "c", "d"], dtype=object)
    batch.tensors["response_mask"][2:] = 0
    kept, metrics = filter_groups(batch, metric="acc")
    assert kept.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert metrics == {"training/filter_groups_kept": 2.0, "training/filter_groups_dropped": 2.0}


def test_selected_tokens_are_added_for_the_covariance_losses_only() -> None:
    batch = advantages_of(rewards_from_scores(make()), "grpo")
    chosen = add_selected_tokens(
        batch, ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.3)), seed=0
    )
    assert values(chosen, "selected_tokens").sum() == int(0.3 * 11)
    assert add_selected_tokens(batch, ActorConfig(), seed=0) is batch


def test_gae_over_turns_discounts_by_turns_and_gives_all_tokens_of_one_the_same():
    batch = DataProto.from_dict(
        {
            "token_level_rewards": torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0, 0.0], [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]),
            "values": torch.tensor([[0.1, 0.2, 9.0, 0.3, 0.4, 9.0], [0.25, 9.0, 9.0, 9.0, 9.0, 9.0]]),
            "response_mask": torch.tensor([[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]]),
            "turn_ids": torch.tensor([[0, 0, -1, 1, 1, -1], [0, -1, -1, -1, -1, -1]]),
        }
    )
    config = AlgorithmConfig(gamma=0.9, lam=0.8, adv_unit="turn")
    out = compute_advantage(batch, config).batch
    second = 2.0 - 0.3
    first = 1.0 + 0.9 * 0.3 - 0.1 + 0.9 * 0.8 * second
    whole = torch.tensor([[first, first, 0, second, second, 0], [0.25, 0, 0, 0, 0, 0]])
    values = torch.tensor([[0.1, 0.1, 0, 0.3, 0.3, 0], [0.25, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(out["returns"], whole + values)
    centred = (whole - torch.tensor([first, second, 0.25]).mean()) * batch.batch["response_mask"]
    torch.testing.assert_close(out["advantages"] / out["advantages"][0, 0], centred / centred[0, 0])
