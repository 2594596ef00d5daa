"""Episodes with branches as a batch: every drawn token is trained once, and an episode counts once in its group."""

from dataclasses import replace

import pytest
import torch

from rlsys.agent.collate import collate_episodes, first_rows, with_branches
from rlsys.agent.runner import EpisodeResult
from rlsys.agent.trace import Span, Trace
from rlsys.algorithms.kl import KLController
from rlsys.algorithms.stages import (
    apply_kl_penalty,
    compute_advantage,
    filter_groups,
    rewards_from_scores,
    shape_batch_rewards,
)
from rlsys.config.schema.algorithm import AlgorithmConfig, KLControlConfig, NormConfig
from rlsys.protocol import IMAGES, DataProto, object_array
from rlsys.types import Finish, ModelResponse
from rlsys.utils.errors import ConfigError

REWARDS = [1.0, 0.0, 0.5, 1.0, 0.25, 0.0]
NUM_ROWS = [1, 3, 2, 1, 0, 2]
UIDS = ["a", "a", "a", "b", "b", "b"]


def draw(trace: Trace, parent: Span, ids: tuple[int, ...]) -> Span:
    logs, versions = (-0.5,) * len(ids), (3,) * len(ids)
    return trace.draw(parent, ModelResponse("r", parent.context, ids, logs, logs, versions, Finish.STOP))


def episode(num_rows: int, reward: float, turn_rewards: list[float] | None = None) -> EpisodeResult:
    """A main conversation of two turns, and `num_rows - 1` histories that were rewritten."""
    trace = Trace()
    for row in range(num_rows):
        prompt = trace.give((10 + row, 11))
        answer = draw(trace, prompt, (20 + row, 21))
        if row == 0:
            draw(trace, trace.give((30,), answer), (40,))
    return EpisodeResult(trace.rows(reward, turn_rewards), reward, "stop")


def batch_of(results: list[EpisodeResult]) -> DataProto:
    prompts = DataProto.from_dict({}, {"uid": object_array(UIDS[: len(results)])}, {"pad_token_id": 0})
    return collate_episodes(results, prompts, pad_token_id=0, prompt_length=3, response_length=5)


@pytest.fixture
def whole() -> DataProto:
    results = [episode(rows, reward) for rows, reward in zip(NUM_ROWS, REWARDS)]
    return with_branches(batch_of(results), max_rows=8)


def test_every_branch_is_a_row_and_every_drawn_token_is_trained_once(whole: DataProto) -> None:
    assert len(whole) == 6 * 3
    assert whole.meta_info["rows_per_episode"] == 3
    trained = whole.tensors["response_mask"].sum(-1).reshape(6, 3)
    assert trained.tolist() == [[3, 0, 0], [3, 2, 2], [3, 2, 0], [3, 0, 0], [0, 0, 0], [3, 2, 0]]
    weights = torch.where(trained > 0, whole.tensors["row_weights"].reshape(6, 3), 0.0).sum(-1)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0]))
    assert whole.tensors["responses"][4].tolist() == [21, 21, 0, 0, 0]
    assert whole.tensors["prompts"][4].tolist() == [0, 11, 11]
    assert [len(part.tensors) for part in (first_rows(whole), whole)] == [6, 18]


def test_the_columns_of_an_episode_of_two_turns() -> None:
    """Prompt 10 11, drawn 20 21, given 30, drawn 40."""
    tensors = batch_of([episode(1, 1.0)]).tensors
    assert {name: tensors[name][0].tolist() for name in sorted(tensors.keys())} == {
        "attention_mask": [0, 1, 1, 1, 1, 1, 1, 0],
        "input_ids": [0, 10, 11, 20, 21, 30, 40, 0],
        "position_ids": [0, 0, 1, 2, 3, 4, 5, 0],
        "prompts": [0, 10, 11],
        "response_mask": [1, 1, 0, 1, 0],
        "responses": [20, 21, 30, 40, 0],
        "rollout_log_probs": [-0.5, -0.5, 0, -0.5, 0],
        "rollout_sampled_log_probs": [-0.5, -0.5, 0, -0.5, 0],
        "row_weights": 1,
        "token_level_scores": [0, 0, 0, 1, 0],
        "turn_ids": [0, 0, -1, 1, -1],
        "weight_versions": [3, 3, -1, 3, -1],
    }


def test_an_episode_that_its_workflow_scores_has_no_accuracy_and_one_without_a_score_has_0() -> None:
    graded, own, cut, lost = (episode(1, reward) for reward in (1.0, 0.9, 0.0, 0.0))
    results = [
        replace(graded, extra={"acc": 1.0, "tool_reward": 0.5}),
        own,
        replace(cut, end="length"),
        replace(lost, end="ungraded", extra={"reward_error": "no answer"}),
    ]
    columns = batch_of(results).non_tensor_batch
    assert list(columns["acc"]) == [1.0, None, 0.0, 0.0]
    assert list(columns["tool_reward"]) == [0.5, 0.0, 0.0, 0.0]


def test_an_accuracy_that_is_text_is_refused_by_a_filter_of_groups() -> None:
    right, wrong, cut = (replace(episode(1, 1.0), extra={"acc": acc, "pred": "7"}) for acc in ("1.0", "0.0", 0.0))
    batch = batch_of([right, wrong, replace(cut, end="length"), episode(1, 0.9)])
    assert list(batch.non_tensor_batch["acc"]) == ["1.0", "0.0", 0.0, None]
    assert "pred" not in batch.non_tensor_batch
    with pytest.raises(ConfigError, match=r"filter_groups\.metric=acc is not a number of every answer, one has '1.0'"):
        filter_groups(batch, metric="acc")


def test_a_batch_without_branches_is_left_alone_and_too_many_rows_are_counted() -> None:
    single = batch_of([episode(1, 1.0), episode(0, 0.0)])
    assert with_branches(single, max_rows=8) is single
    several = with_branches(batch_of([episode(4, 1.0), episode(2, 0.0)]), max_rows=2)
    assert len(several) == 4
    assert several.meta_info["source_metrics"] == {"agent/untrained_rows": 2.0}
    one = with_branches(batch_of([episode(4, 1.0), episode(2, 0.0)]), max_rows=1)
    assert len(one) == 2
    assert one.meta_info["source_metrics"] == {"agent/untrained_rows": 4.0}
    without_agents = DataProto.from_dict({"response_mask": torch.ones(2, 3)})
    assert first_rows(without_agents) is with_branches(without_agents, max_rows=8) is without_agents
    assert IMAGES not in single.non_tensor_batch


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8])
def test_an_episode_with_more_rows_than_are_trained_keeps_its_reward_in_its_group(max_rows: int) -> None:
    rewards, config = [1.0, 0.8, 0.0], AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    results = [episode(rows, reward) for rows, reward in zip([4, 1, 0], rewards)]
    batch = with_branches(batch_of(results), max_rows=max_rows)
    out = compute_advantage(rewards_from_scores(batch), config).tensors["advantages"].unflatten(0, (3, -1))
    assert out[0].amax().item() == pytest.approx(0.1)
    assert out[1].amin().item() == pytest.approx(-0.1)
    assert not out[2].any()
    turns = with_branches(batch_of([episode(2, 0.75, [0.25, 0.0, 0.5]), episode(1, 0.0)]), max_rows=max_rows)
    assert turns.tensors["row_weights"].reshape(2, -1)[:, 0].tolist() == [1.0, 1.0]


def test_branches_that_episodes_lack_do_not_lower_the_kl_of_the_reward(whole: DataProto) -> None:
    mask = whole.tensors["response_mask"].float()
    whole.tensors["old_log_probs"], whole.tensors["ref_log_prob"] = 0.5 * mask, 0.0 * mask
    controller = KLController(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=1.0, horizon=100))
    metrics = apply_kl_penalty(whole, controller)[1]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5 * 9 / 10), "nine rows, and one that failed"
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 10 / 100))


def test_pf_ppo_resamples_episodes_with_all_their_branches(whole: DataProto) -> None:
    settings = AlgorithmConfig(adv_estimator="grpo", use_pf_ppo=True)
    drawn = compute_advantage(rewards_from_scores(whole), settings, seed=2)
    before, after = (batch.tensors["responses"].reshape(6, 3, 5) for batch in (whole, drawn))
    assert all(any(episode.equal(one) for one in before) for episode in after)


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk"])
def test_an_episode_counts_once_in_its_group(whole: DataProto, name: str) -> None:
    config = AlgorithmConfig(adv_estimator=name)
    single = [replace(episode(min(n, 1), r)) for n, r in zip(NUM_ROWS, REWARDS)]
    expected = compute_advantage(rewards_from_scores(batch_of(single)), config).tensors["advantages"][:, 0]
    advantages = compute_advantage(rewards_from_scores(whole), config).tensors["advantages"]
    mask = whole.tensors["response_mask"].bool()
    assert (advantages[~mask] == 0).all()
    for number, rows in enumerate(advantages.reshape(6, 3, 5)):
        drawn = rows[mask.reshape(6, 3, 5)[number]]
        torch.testing.assert_close(drawn, expected[number].expand_as(drawn))


def test_rewards_are_shaped_by_episodes() -> None:
    results = [episode(rows, reward) for rows, reward in zip([1, 2, 2], [1.0, 0.0, 0.5])]
    config = AlgorithmConfig(reward_norm=NormConfig(mean_level="group", std_level="batch"), reward_scaling=2.0)
    shaped = shape_batch_rewards(with_branches(batch_of(results), max_rows=8), config)
    single = shape_batch_rewards(batch_of([replace(r, rows=r.rows[:1]) for r in results]), config)
    sums = shaped.tensors["token_level_scores"].sum(-1).reshape(3, 2)
    torch.testing.assert_close(sums[:, 0], single.tensors["token_level_scores"].sum(-1))
    torch.testing.assert_close(sums[1:, 0], sums[1:, 1])


def test_groups_compare_turns_by_the_rewards_from_them_on() -> None:
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.25]]
    batch = rewards_from_scores(batch_of([episode(1, sum(turns), turns) for turns in rewards]))
    out = compute_advantage(batch, AlgorithmConfig(adv_estimator="rloo", adv_unit="turn")).tensors["advantages"]
    first = [1.0 - (1.0 + 0.75) / 2, 1.0 - (1.0 + 0.75) / 2, 0.75 - 1.0]
    second = [0.0 - (1.0 + 0.25) / 2, 1.0 - (0.0 + 0.25) / 2, 0.25 - 0.5]
    expected = torch.tensor([[a, a, 0.0, b, 0.0] for a, b in zip(first, second)])
    torch.testing.assert_close(out, expected)


def test_an_episode_has_the_rewards_of_turns_that_its_branches_train() -> None:
    results = [episode(2, 0.75, [0.25, 0.0, 0.5]), episode(1, 0.75, [0.5, 0.25]), episode(2, 0.75)]
    batch = rewards_from_scores(batch_of(results))
    assert not len(filter_groups(batch, metric="score")[0]), "all three have the same reward"
    for first in (first_rows(batch), first_rows(with_branches(batch, max_rows=8))):
        for name in ("token_level_scores", "token_level_rewards"):
            assert first.tensors[name].sum(-1).tolist() == [0.75] * 3


def test_an_episode_of_rows_with_rewards_of_their_own_has_their_mean() -> None:
    """As those of an `arun_episode` that returns several rows."""
    right, wrong = (
        [replace(row, rewards=(*row.rewards[:-1], reward), weight=1 / 3) for row, reward in zip(rows, rewards)]
        for rows, rewards in ((episode(3, 0.0).rows, (1.0, 0.0, 0.5)), (episode(3, 0.0).rows, (0.0, 0.0, 0.0)))
    )
    batch = rewards_from_scores(batch_of([EpisodeResult(tuple(rows), 0.0, "stop") for rows in (right, wrong)]))
    for first in (first_rows(batch), first_rows(with_branches(batch, max_rows=8))):
        assert first.tensors["token_level_scores"].sum(-1).tolist() == pytest.approx([0.5, 0.0])
    assert len(filter_groups(batch, metric="score")[0]) == 2


def test_a_turn_that_no_other_episode_of_the_group_has_is_not_compared() -> None:
    trace = Trace()
    draw(trace, trace.give((10, 11)), (20, 21))
    short = EpisodeResult(trace.rows(0.5), 0.5, "stop")
    batch = rewards_from_scores(batch_of([episode(1, 1.0), short]))
    out = compute_advantage(batch, AlgorithmConfig(adv_estimator="rloo", adv_unit="turn")).tensors["advantages"]
    assert out.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0], [-0.5, -0.5, 0.0, 0.0, 0.0]]


def test_turns_are_compared_within_their_prompt() -> None:
    """Of three prompts; the very first episode lacks the second turn."""
    trace = Trace()
    draw(trace, trace.give((10, 11)), (20, 21))
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.25], [0.25, 0.5], [1.0, 1.0]]
    episodes = [EpisodeResult(trace.rows(0.5), 0.5, "stop"), *(episode(1, sum(turns), turns) for turns in rewards)]
    batch = rewards_from_scores(batch_of(episodes))
    batch.non_tensor_batch["uid"] = object_array(["a", "a", "b", "b", "c", "c"])
    out = compute_advantage(batch, AlgorithmConfig(adv_estimator="rloo", adv_unit="turn")).tensors["advantages"]
    assert out[:, 0].tolist() == [-0.5, 0.5, 0.25, -0.25, -1.25, 1.25]
    assert out[:, 3].tolist() == [0.0, 0.0, 0.75, -0.75, -0.5, 0.5]


@pytest.mark.parametrize("with_graded", [True, False])
def test_a_filter_by_accuracy_takes_the_score_of_episodes_that_their_workflow_scored(with_graded: bool) -> None:
    own = [episode(1, reward) for reward in (0.5, 0.25, 0.5, 0.5)]
    right = [replace(episode(2, reward), extra={"acc": 1.0}) for reward in (1.1, 0.9)]
    batch = batch_of([*own, *(right if with_graded else own[:2])])
    batch.non_tensor_batch["uid"] = object_array(["a", "a", "b", "b", "c", "c"])
    kept, _ = filter_groups(batch, metric="acc")
    assert kept.non_tensor_batch["uid"].tolist() == ["a", "a"] + ["c", "c"] * (not with_graded)


def test_failed_episodes_are_filtered_with_their_prompt() -> None:
    failed = EpisodeResult((), 0.0, "error")
    batch = batch_of([episode(1, 1.0), failed, episode(1, 1.0), episode(1, 1.0), failed, episode(1, 0.0)])
    kept, metrics = filter_groups(batch, metric="score")
    assert kept.non_tensor_batch["uid"].tolist() == ["b", "b/4", "b"]
    assert metrics == {"training/filter_groups_kept": 1.0, "training/filter_groups_dropped": 1.0}
