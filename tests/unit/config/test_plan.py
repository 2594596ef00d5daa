"""Batch arithmetic, pools, run length and memory."""

from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import PPOConfig, SFTConfig, load_config, plan_batches
from rlsys.config.plan import RolePlan, plan_text, total_steps
from rlsys.config.pools import process_pools, resolve_pools
from rlsys.config.schema.types import MicroBatches

SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_a_step_by_hand() -> None:
    cfg = load_config(
        [
            "data.train_batch_size=32",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
            "actor_rollout_ref.actor.ppo_epochs=3",
            "critic.ppo_mini_batch_size=8",
            "critic.ppo_micro_batch_size_per_gpu=8",
            "critic.ppo_epochs=1",
            "critic.enable=true",
            "trainer.n_gpus_per_node=2",
        ]
    )
    plan = plan_batches(cfg)
    assert plan.samples == 128
    assert (plan.actor.mini_batch_samples, plan.actor.mini_batches, plan.actor.rank_samples) == (64, 2, 32)
    assert (plan.actor.micro_batches, plan.actor.optimizer_steps) == (7, 6)
    assert plan.critic is not None
    assert (plan.critic.mini_batches, plan.critic.rank_samples, plan.critic.micro_batches) == (4, 16, 2)


def test_filling_by_tokens_leaves_the_number_of_micro_batches_open() -> None:
    cfg = load_config([])
    plan = plan_batches(cfg)
    assert plan.actor.micro_batches is None
    assert plan.actor.size == MicroBatches(max_tokens=4096)
    assert plan.critic is None
    assert not cfg.use_reference


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64), st.integers(1, 3))
def test_every_sample_is_in_one_micro_batch(minis: int, ranks: int, share: int, micro: int, epochs: int) -> None:
    mini_samples = ranks * share
    role = RolePlan(
        samples=minis * mini_samples,
        mini_batch_samples=mini_samples,
        dp_size=ranks,
        epochs=epochs,
        size=MicroBatches(rows=micro),
    )
    assert role.rank_samples * role.dp_size * role.mini_batches == minis * mini_samples
    assert role.micro_batches is not None
    assert role.micro_batch_samples is not None
    assert (role.micro_batches - 1) * role.micro_batch_samples < role.rank_samples
    assert role.rank_samples <= role.micro_batches * role.micro_batch_samples
    assert role.optimizer_steps == minis * epochs


def test_total_steps_leave_out_the_rest_of_an_epoch() -> None:
    assert total_steps(100, 32, 3, None) == 9
    assert total_steps(100, 32, 3, 5) == 5
    assert total_steps(31, 32, 3, None) == 0


def test_copies_of_the_attention_are_of_one_replica() -> None:
    sizes = {"tensor_model_parallel_size": 2, "data_parallel_size": 8, "expert_parallel_size": 16, "name": "vllm"}
    argv = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in sizes.items()]
    cfg = load_config([*argv, "trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.rollout_workers=32"])
    assert process_pools(cfg, 8) == {"train": [8], "rollout": [8] * 4}
    assert process_pools(cfg, 6)["rollout"] == [6, 6, 4] * 2


def test_split_and_shared_pools() -> None:
    shared = resolve_pools(load_config(["trainer.nnodes=2", "trainer.n_gpus_per_node=3"]))
    assert (shared.train_ranks, shared.rollout_ranks, shared.colocated, shared.total_ranks) == (6, 6, True, 6)
    split = resolve_pools(load_config(["trainer.n_gpus_per_node=2", "trainer.rollout_workers=3"]))
    assert (split.train_ranks, split.rollout_ranks, split.colocated, split.total_ranks) == (2, 3, False, 5)


def test_the_plan_names_what_matters() -> None:
    text = plan_text(load_config(["trainer.rollout_workers=2", "trainer.max_staleness=1"]))
    for words in (
        "48 prompts x 8 = 384 samples",
        "1 optimizer step;",
        "2 for generation",
        "at most 1 behind",
        "25 steps",
    ):
        assert words in text
    assert "4 epochs of (rows / 256) steps" in plan_text(load_config([], SFTConfig))


def test_a_critic_is_there_for_gae_only_unless_asked() -> None:
    for argv, expected in (
        ([], False),
        (["algorithm.adv_estimator=gae"], True),
        (["critic.enable=true"], True),
    ):
        cfg = load_config(argv, PPOConfig)
        assert (plan_batches(cfg).critic is not None) is expected
        assert cfg.use_critic is expected


def test_a_share_that_is_not_split_is_no_warning_and_names_the_key_that_splits_it() -> None:
    fixed, null = (
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    )
    text = plan_text(load_config([fixed, f"{null}=null"]))
    assert f"({null}=1 uses the least memory)" in text
    assert "warning" not in text
    assert "least memory" not in plan_text(load_config([fixed, f"{null}=4"]))
    assert "least memory" not in plan_text(load_config([]))
