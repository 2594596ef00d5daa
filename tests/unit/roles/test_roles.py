"""The roles on a tiny float64 engine: what they compute, in which steps they train, and that they learn."""

import math
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig, RouterReplayConfig
from rlsys.config.schema.algorithm import RolloutCorrectionConfig
from rlsys.config.vocabulary import POLICY_LOSSES
from rlsys.protocol import DataProto
from rlsys.roles.actor import PPOActor
from rlsys.roles.critic import PPOCritic
from rlsys.roles.lm import LMEngine, mean_over_ranks
from rlsys.roles.reward_model import RWEngine
from rlsys.roles.update import mini_batches
from rlsys.utils.errors import DataError
from tests import tiny_engine as tiny


def tensors(batch: DataProto) -> Any:
    assert batch.batch is not None
    return batch.batch


def ready(engine: Any, rows: int = 8, seed: int = 0) -> DataProto:
    """A batch with old and reference log-probabilities."""
    batch = tiny.make_batch(rows, seed=seed)
    actor = PPOActor(engine, ActorConfig())
    batch = batch.union(actor.compute_logp(batch))
    return batch.union(PPOActor(tiny.TinyEngine(seed=9), ActorConfig()).compute_logp(batch, name="ref_log_prob"))


def test_logp_gives_the_columns_asked_for_at_the_temperature_of_the_batch() -> None:
    engine, batch = tiny.TinyEngine(), tiny.make_batch()
    actor = PPOActor(engine, ActorConfig())
    plain = actor.compute_logp(batch)
    assert set(tensors(plain).keys()) == {"old_log_probs"}
    everything = actor.compute_logp(batch, name="ref_log_prob", entropy=True, sum_pi_squared=True)
    assert set(tensors(everything).keys()) == {"ref_log_prob", "entropys", "sum_pi_squared"}
    torch.testing.assert_close(tensors(everything)["ref_log_prob"], tensors(plain)["old_log_probs"])
    batch.meta_info["temperature"] = 5.0
    hot = tensors(actor.compute_logp(batch))["old_log_probs"]
    assert hot.sum() != tensors(plain)["old_log_probs"].sum()
    torch.testing.assert_close(hot, engine.forward(batch, ("log_probs",), temperature=5.0)["log_probs"])
    del batch.meta_info["temperature"]
    unscaled = tensors(actor.compute_logp(batch))["old_log_probs"]
    torch.testing.assert_close(unscaled, engine.forward(batch, ("log_probs",), temperature=1.0)["log_probs"])


def test_the_first_step_is_the_policy_gradient_and_metrics_have_verls_names() -> None:
    engine = tiny.TinyEngine()
    batch = ready(engine)
    log_probs = engine._outputs(batch, ("log_probs",), 1.0)["log_probs"]
    mask = tensors(batch)["response_mask"]
    loss = -(tensors(batch)["advantages"] * log_probs).sum() / mask.sum()
    expected = torch.autograd.grad(loss, [engine.model.head, engine.model.mix])
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=0.0, calculate_entropy=True)
    metrics = PPOActor(engine, config).ppo_update(batch)
    torch.testing.assert_close(engine.gradients[0]["head"], expected[0])
    torch.testing.assert_close(engine.gradients[0]["mix"], expected[1])
    assert set(metrics) == {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/kl_loss",
        "actor/kl_coef",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "actor/skipped_steps",
    }
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-12)
    entropy = engine.forward(batch, ("entropy",))["entropy"]
    assert 0 < metrics["actor/entropy"] < math.log(tiny.VOCABULARY)
    assert entropy.shape == mask.shape


MODES = ["token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "token-mean") for name in POLICY_LOSSES), *(("vanilla", mode) for mode in MODES)]
)
def test_micro_batches_do_not_change_what_is_learned(name: str, mode: str) -> None:
    correction = RolloutCorrectionConfig(rollout_is="token", loss_type="reinforce")
    config = ActorConfig(
        policy_loss=PolicyLossConfig(
            loss_mode=name, kl_cov_ratio=0.1, clip_cov_ratio=0.1, clip_cov_lb=0.01, dro_beta=1.0
        ),
        loss_agg_mode=mode,  # pyrefly: ignore[bad-argument-type]
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        ppo_mini_batch_size=4,
        ppo_epochs=2,
        shuffle=True,
    )
    learned, reported = [], []
    for micro_rows in (1, 3, 8):
        engine = tiny.TinyEngine(micro_rows=micro_rows)
        reported.append(PPOActor(engine, config, rollout_correction=correction).ppo_update(ready(engine)))
        learned.append(torch.cat([p.detach().flatten() for p in engine.model.parameters()]))
    for parameters, metrics in zip(learned[1:], reported[1:], strict=True):
        torch.testing.assert_close(parameters, learned[0], rtol=1e-10, atol=1e-12)
        of_micro_batches = {key for key in metrics if key.startswith("rollout_corr/")} - {"rollout_corr/kl"}
        exact, expected = ({k: v for k, v in m.items() if k not in of_micro_batches} for m in (metrics, reported[0]))
        assert exact == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_mini_batches_are_contiguous_or_a_permutation_by_seed_step_and_epoch() -> None:
    batch = tiny.make_batch(10)
    batch.meta_info["global_steps"] = 3

    def order(**settings: Any) -> list[list[int]]:
        config = ActorConfig(ppo_mini_batch_size=4, **settings)
        parts = mini_batches(batch, config, rollout_n=1, dp_size=1)
        return [tensors(part)["index"].tolist() for part in parts]

    assert order() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shuffled = order(shuffle=True, ppo_epochs=2)
    assert sorted(chain.from_iterable(shuffled[:3])) == list(range(10))
    assert shuffled[:3] != shuffled[3:]
    assert shuffled == order(shuffle=True, ppo_epochs=2)
    assert shuffled != order(shuffle=True, ppo_epochs=2, data_loader_seed=1)
    batch.meta_info["rows_per_episode"] = 2
    rows = [*chain.from_iterable(order(shuffle=True))]
    assert rows[1::2] == [first + 1 for first in rows[::2]], "an episode's rows stay together"
    assert sorted(rows) == list(range(10)) != rows
    del batch.meta_info["rows_per_episode"]
    with pytest.raises(ValueError, match="ppo_mini_batch_size=2 gives 4 ranks no row"):
        next(mini_batches(batch, ActorConfig(ppo_mini_batch_size=2), rollout_n=1, dp_size=4))
    parts = mini_batches(batch, ActorConfig(ppo_mini_batch_size=2), rollout_n=4, dp_size=2)
    assert [len(part) for part in parts] == [4, 4, 2]


def test_a_refused_step_is_counted_and_leaves_the_others_alone() -> None:
    engine = tiny.TinyEngine()
    batch = ready(engine)
    tensors(batch)["advantages"][0, 0] = math.nan
    metrics = PPOActor(engine, ActorConfig(ppo_mini_batch_size=4)).ppo_update(batch)
    assert metrics["actor/skipped_steps"] == 1
    assert [step.applied for step in engine.steps] == [False, True]
    assert math.isfinite(metrics["actor/grad_norm"])


def test_routes_that_are_to_be_replayed_must_be_there() -> None:
    engine = tiny.TinyEngine()
    actor = PPOActor(engine, ActorConfig(router_replay=RouterReplayConfig(mode="R3")))
    with pytest.raises(DataError, match=r"no routed_experts, which actor\.router_replay\.mode=R3 replays"):
        actor.ppo_update(ready(engine))
    assert not engine.steps


def test_train_batch_is_one_step_and_grpo_update_is_ppo_update() -> None:
    engine = tiny.TinyEngine()
    actor = PPOActor(engine, ActorConfig(ppo_mini_batch_size=2))
    actor.train_batch(ready(engine))
    assert len(engine.steps) == 1
    actor.grpo_update(ready(engine))
    assert len(engine.steps) == 5


def test_the_actor_learns_the_rewarded_token() -> None:
    engine = tiny.TinyEngine(lr=1.0)
    actor = PPOActor(engine, ActorConfig(ppo_mini_batch_size=16))

    def liked(batch: DataProto) -> Tensor:
        return (tensors(batch)["responses"] == 5) * tensors(batch)["response_mask"]

    def probability() -> float:
        probe = tiny.make_batch(16, seed=77)
        tensors(probe)["responses"][:] = 5
        return engine.forward(probe, ("log_probs",))["log_probs"][:, 0].exp().mean().item()

    before = probability()
    for step in range(10):
        batch = tiny.make_batch(32, seed=step)
        batch = batch.union(actor.compute_logp(batch))
        tensors(batch)["advantages"] = liked(batch).double() - liked(batch).double().mean()
        actor.ppo_update(batch)
    assert probability() > 2 * before


def test_the_critic_regresses_on_returns() -> None:
    engine = tiny.TinyEngine(lr=0.5)
    critic = PPOCritic(engine, CriticConfig(cliprange_value=10.0, ppo_mini_batch_size=4))
    batch = tiny.make_batch()
    batch = batch.union(critic.compute_values(batch))
    assert tensors(batch)["values"].shape == (8, 5)
    first = critic.ppo_update(batch)
    assert set(first) == {
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
        "critic/skipped_steps",
    }
    for _ in range(20):
        last = critic.ppo_update(batch)
    assert last["critic/vf_loss"] < 0.7 * first["critic/vf_loss"]
    with pytest.raises(ValueError, match="cliprange_value"):
        CriticConfig(cliprange_value=0.0)


def test_sft_lowers_the_mean_loss_of_the_response_tokens() -> None:
    engine = tiny.TinyEngine(lr=1.0)
    lm = LMEngine(engine)
    batch = tiny.make_batch()
    mask = tensors(batch)["response_mask"]
    expected = -engine.forward(batch, ("log_probs",))["log_probs"].sum().item() / mask.sum().item()
    halves = [lm.evaluate_lm(batch[:3]), lm.evaluate_lm(batch[3:])]
    assert mean_over_ranks(halves)["val/loss"] == pytest.approx(expected, rel=1e-9)
    first = lm.train_lm(batch)
    assert first["train/loss"] == pytest.approx(expected, rel=1e-9)
    assert first["train/ppl"] == pytest.approx(math.exp(expected), rel=1e-9)
    for _ in range(20):
        last = lm.train_batch(batch)
    assert last["train/loss"] < 0.8 * expected


class TestRewardModel:
    def test_a_score_is_the_value_after_the_last_token(self) -> None:
        engine, batch = tiny.TinyEngine(), tiny.make_batch()
        held = tensors(batch)
        hidden = engine.model(held["input_ids"], held["attention_mask"], held["position_ids"])
        last = held["attention_mask"].sum(1) - 1 + (held["attention_mask"].argmax(1))
        expected = (hidden @ engine.model.value).gather(1, last.unsqueeze(1)).squeeze(1).detach()
        scores = tensors(RWEngine(engine).score(batch))["rm_scores"]
        torch.testing.assert_close(scores.sum(1), expected)
        assert torch.equal(scores != 0, torch.nn.functional.one_hot(held["response_mask"].sum(1) - 1, 5).bool())

    @pytest.mark.parametrize("micro_rows", [1, 3, 8])
    def test_the_gradient_is_that_of_bradley_terry_though_pairs_are_split(self, micro_rows: int) -> None:
        engine, batch = tiny.TinyEngine(micro_rows=micro_rows), tiny.make_batch()
        held = tensors(batch)
        hidden = engine.model(held["input_ids"], held["attention_mask"], held["position_ids"])
        last = held["attention_mask"].sum(1) - 1 + (held["attention_mask"].argmax(1))
        scores = (hidden @ engine.model.value).gather(1, last.unsqueeze(1)).view(-1, 2)
        margin = scores[:, 0] - scores[:, 1]
        loss = -torch.nn.functional.logsigmoid(margin).mean()
        gradient = torch.autograd.grad(loss, [engine.model.value, engine.model.mix])
        metrics = RWEngine(engine).train_rw(batch)
        torch.testing.assert_close(engine.gradients[0]["value"], gradient[0])
        torch.testing.assert_close(engine.gradients[0]["mix"], gradient[1])
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert metrics["train/accuracy"] == pytest.approx((margin > 0).double().mean().item())
        assert metrics["train/margin"] == pytest.approx(margin.mean().item(), rel=1e-9)

    def test_it_learns_to_separate_pairs(self) -> None:
        engine = tiny.TinyEngine(lr=1.0)
        model = RWEngine(engine)
        batch = tiny.make_batch(16)
        for _ in range(20):
            model.train_batch(batch)
        measured = mean_over_ranks([model.evaluate_rw(batch)])
        assert measured["val/accuracy"] == 1
        assert measured["val/loss"] < 0.5

    def test_padding_pairs_do_not_count_and_odd_rows_are_refused(self) -> None:
        batch = tiny.make_batch()
        padded = DataProto.concat([batch, tiny.make_batch(2)])
        tensors(padded)["attention_mask"][-1, 3:] = 0
        model = RWEngine(tiny.TinyEngine())
        plain, with_padding = model.evaluate_rw(batch), model.evaluate_rw(padded)
        assert with_padding["val/loss"] == pytest.approx(plain["val/loss"])
        with pytest.raises(ValueError, match="even number"):
            model.train_rw(batch[:3])
