"""The verbs of a step, with groups that return fixed numbers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlsys.algorithms.kl import KLController
from rlsys.config import PPOConfig, load_config, plan_batches
from rlsys.config.schema.algorithm import KLControlConfig
from rlsys.protocol import DataProto
from rlsys.telemetry.metrics import StageTimer
from trainer.groups import Role, WorkerGroups
from trainer.reporting import Reporter
from trainer.residency import Residency
from trainer.steps import Steps, rewards_to_advantages

SMALL = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


def config(*settings: str) -> PPOConfig:
    return load_config(["--config-name=quickstart", *SMALL, *settings])


def rows(scores: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)) -> DataProto:
    """Four rows of two prompts: one token of prompt and two of response, scored on the last one."""
    zeros, ones = torch.zeros(4, 2), torch.ones(4, 2)
    level = zeros.clone()
    level[:, 1] = torch.tensor(scores)
    tensors = {
        "prompts": torch.ones(4, 1, dtype=torch.long),
        "responses": torch.arange(8).view(4, 2),
        "input_ids": torch.ones(4, 3, dtype=torch.long),
        "attention_mask": torch.ones(4, 3, dtype=torch.long),
        "position_ids": torch.arange(3).repeat(4, 1),
        "response_mask": ones.long(),
        "rollout_log_probs": -ones,
        "token_level_scores": level,
    }
    uid = np.array(["a", "a", "b", "b"], dtype=object)
    return DataProto.from_dict(tensors, non_tensors={"uid": uid}, meta_info={"temperature": 0.7, "global_steps": 1})


class Scorer:
    """Groups of all roles: -2 for every log-prob, 1.5 for each of two rewards; it keeps the columns it was sent."""

    def __init__(self) -> None:
        self.columns: dict[str, set[str]] = {}
        self.temperature = 0.0

    def answer(self, data: DataProto, call: str, **columns: float) -> DataProto:
        self.columns[call] = set(data.tensors.keys())
        self.temperature = data.meta_info["temperature"]
        return DataProto.from_dict({name: torch.full((4, 2), value) for name, value in columns.items()})

    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self.answer(data, "old", old_log_probs=-2.0, entropys=0.5)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self.answer(data, "ref", ref_log_prob=-3.0)

    def compute_rm_score(self, data: DataProto) -> DataProto:
        return self.answer(data, "rm", rm_scores=1.5)

    def update_actor(self, data: DataProto) -> DataProto:
        self.columns |= {"update": set(data.tensors.keys()), "objects": set(data.non_tensor_batch)}
        return DataProto(meta_info={"metrics": {"actor/loss": [1.0, 3.0]}})


def steps_of(cfg: PPOConfig, **roles: Any) -> tuple[Steps, Scorer, dict[str, float]]:
    scorer, metrics = Scorer(), dict[str, float]()
    reporter = cast(
        Reporter,
        SimpleNamespace(
            add=metrics.update,
            add_lists=lambda new: metrics.update({k: float(np.mean(v)) for k, v in new.items()}),
            stage=StageTimer(),
        ),
    )
    groups = WorkerGroups(actor=cast(Any, scorer), **dict.fromkeys(roles, scorer))
    controller = KLController(KLControlConfig(kl_coef=0.1))
    return Steps(cfg, plan_batches(cfg), groups, Residency({}, StageTimer()), reporter, controller), scorer, metrics


def test_log_probs_come_from_the_actor_at_the_batchs_temperature() -> None:
    steps, scorer, metrics = steps_of(config())
    batch = steps.old_log_probs(rows())
    assert batch.tensors["old_log_probs"].eq(-2).all()
    assert "entropys" not in batch.tensors
    assert metrics["actor/entropy"] == 0.5
    assert scorer.temperature == 0.7
    assert "rollout_log_probs" not in scorer.columns["old"]
    assert steps.residency.resident is Role.Actor


def test_bypass_mode_takes_the_rollouts_log_probs() -> None:
    steps, scorer, _ = steps_of(config("algorithm.rollout_correction.bypass_mode=true"))
    batch = steps.old_log_probs(rows())
    assert batch.tensors["old_log_probs"].eq(-1).all()
    assert scorer.columns == {}


def test_without_a_reference_group_the_actor_scores_for_it() -> None:
    steps, _, _ = steps_of(config("actor_rollout_ref.actor.use_kl_loss=true"))
    assert steps.reference_log_probs(rows()).tensors["ref_log_prob"].eq(-3).all()
    assert steps.residency.resident is Role.Actor
    with_group, _, _ = steps_of(config("actor_rollout_ref.actor.use_kl_loss=true"), ref=True)
    with_group.reference_log_probs(rows())
    assert with_group.residency.resident is Role.RefPolicy
    without, unused, _ = steps_of(config())
    assert "ref_log_prob" not in without.reference_log_probs(rows()).tensors
    assert unused.columns == {}


def test_a_reward_model_adds_to_the_graders_scores() -> None:
    steps, scorer, _ = steps_of(config(), rm=True)
    assert steps.reward_model_scores(rows()).tensors["token_level_scores"][0].tolist() == [0.0, 4.0]
    own_tokens = replace(steps, reward_rows=lambda batch: batch.select(batch_keys=["responses"]))
    own_tokens.reward_model_scores(rows())
    assert scorer.columns["rm"] == {"responses"}
    plain, _, _ = steps_of(config())
    assert plain.reward_model_scores(rows()).tensors["token_level_scores"][0].tolist() == [0.0, 1.0]


def test_the_actor_is_sent_what_the_loss_reads() -> None:
    steps, scorer, metrics = steps_of(config())
    batch = steps.advantages(steps.old_log_probs(rows()))
    steps.update_actor(batch)
    assert metrics["actor/loss"] == 2.0
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(np.exp(-1) - np.exp(-2))
    assert {"advantages", "old_log_probs", "rollout_log_probs"} <= scorer.columns["update"]
    assert scorer.columns["objects"] == set(), "neither uids nor texts travel"
    assert not {"token_level_scores", "returns", "values"} & scorer.columns["update"]


def test_balancing_counts_tokens_and_keeps_the_temperature() -> None:
    steps, _, metrics = steps_of(config())
    batch = rows()
    batch.meta_info["source_metrics"] = {"rollout/num_gen_batches": 1.0}
    batch.tensors["weight_versions"] = torch.tensor([[4, 4], [4, 4], [4, 4], [3, 2]])
    batch.tensors["response_mask"][2] = 0
    batch = steps.balance(batch, 5)
    assert metrics["training/staleness"] == 3 / 6, "of trained tokens, in all rows"
    assert batch.meta_info == {"temperature": 0.7, "global_steps": 5, "global_token_num": [3, 3, 3, 3]}
    assert metrics["rollout/num_gen_batches"] == 1.0


@pytest.mark.parametrize(
    ("settings", "size", "largest"),
    [((), 1, 4), (("trainer.balance_batch=false",), 1, 6), ((), 2, 6)],
    ids=["rows", "as they are", "episodes of two rows"],
)
def test_balancing_gives_ranks_as_many_tokens(settings: tuple[str, ...], size: int, largest: int) -> None:
    steps, _, metrics = steps_of(config("trainer.n_gpus_per_node=2", *settings))
    batch = rows()
    batch.meta_info["rows_per_episode"] = size
    batch.tensors["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 0, 0]])
    batch.tensors["weight_versions"] = torch.zeros(4, 2)
    batch.tensors["response_mask"][:] = 0
    batch = steps.balance(batch, 1)
    order = (batch.tensors["responses"][:, 0] // 2).tolist()
    if largest == 4:
        assert sorted(order) == [0, 1, 2, 3]
        assert batch.tensors["attention_mask"].sum(1).view(2, 2).sum(1).tolist() == [4, 4]
    else:
        assert order == [0, 1, 2, 3]
    assert (metrics["global_seqlen/max"], metrics["global_seqlen/balanced_max"]) == (6, largest)
    assert "training/staleness" not in metrics, "no token is trained"


def test_grpo_advantages_by_hand() -> None:
    batch = rows()
    batch.tensors["old_log_probs"] = torch.full((4, 2), -1.0)
    batch, _ = rewards_to_advantages(batch, config(), KLController(KLControlConfig(kl_coef=0.1)))
    deviation = 0.5**0.5  # of 1 and 0 with n - 1
    expected = 0.5 / (deviation + 1e-6)
    assert batch.tensors["advantages"][:, 0].tolist() == pytest.approx([expected, -expected, 0, 0])


def test_pf_ppo_draws_other_rows_in_another_step() -> None:
    cfg = config("algorithm.use_pf_ppo=true", "algorithm.pf_ppo.weight_pow=0.1")
    drawn = []
    for step in (1, 1, 2):
        batch = rows((1.0, 0.8, 0.6, 0.4))
        batch.meta_info["global_steps"] = step
        batch.tensors["old_log_probs"] = torch.full((4, 2), -1.0)
        out, _ = rewards_to_advantages(batch, cfg, KLController(KLControlConfig()))
        drawn.append(out.tensors["responses"][:, 0].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_kl_penalty_lowers_rewards_where_the_policy_left_the_reference() -> None:
    batch = rows()
    batch.tensors["old_log_probs"], batch.tensors["ref_log_prob"] = torch.full((4, 2), -1.0), torch.full((4, 2), -3.0)
    cfg = config("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=kl")
    batch, metrics = rewards_to_advantages(batch, cfg, KLController(KLControlConfig(kl_coef=0.1)))
    assert batch.tensors["token_level_rewards"][0].tolist() == pytest.approx([-0.2, 0.8])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(2.0)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.0)
