"""AReaL's allocation grammar, as far as one engine generates and one trains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import load_config
from rlsys.config.compat.allocation import allocation_settings
from rlsys.config.plan import plan_batches
from rlsys.config.pools import resolve_pools
from rlsys.utils.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRAINS, GENERATES = "trainer.n_gpus_per_node", "trainer.rollout_workers"
TENSOR = f"{ROLLOUT}.tensor_model_parallel_size"
SPLIT = f"{ACTOR}.fsdp_config.tensor_parallel_size"

ACCEPTED = {
    "sglang:d4p1t1+fsdp:d4": {TRAINS: 4, GENERATES: 4, f"{ROLLOUT}.name": "sglang", TENSOR: 1},
    "sglang:d4p1t1+d4p1t1": {TRAINS: 4, GENERATES: 4, f"{ROLLOUT}.name": "sglang"},
    "sglang.d4p1t2+d4p2t1": {TRAINS: 8, GENERATES: 8, TENSOR: 2, f"{ACTOR}.strategy": "megatron"},
    "sglang:d2p2+fsdp:d2": {TRAINS: 2, GENERATES: 4, f"{ROLLOUT}.pipeline_model_parallel_size": 2},
    "vllm:d2p2+fsdp:d2": {TRAINS: 2, GENERATES: 4, f"{ROLLOUT}.pipeline_model_parallel_size": 2},
    "vllm:d2t4+megatron:d2t2p2": {TRAINS: 8, GENERATES: 8, f"{ACTOR}.megatron.pipeline_model_parallel_size": 2},
    "sglang[r]:d4 + fsdp[a]:d2c2": {TRAINS: 4, GENERATES: 4, f"{ACTOR}.ulysses_sequence_parallel_size": 2},
    "sglang[rollout]:d8|fsdp[actor]:d8": {TRAINS: 8, GENERATES: 0},
    "vllm:d2t2e2|fsdp:d4": {TRAINS: 4, GENERATES: 0, TENSOR: 2, f"{ROLLOUT}.expert_parallel_size": 2},
    "vllm:d2t2|fsdp:d4": {TRAINS: 4, GENERATES: 0, TENSOR: 2},
    "hf:d2+fsdp:d2": {TRAINS: 2, GENERATES: 2},
    "hf:d2+archon:d2": {TRAINS: 2, GENERATES: 2},
    "hf:d2+archon:d2t2": {TRAINS: 4, SPLIT: 2},
    "hf:d1+megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)": {
        TRAINS: 32,
        f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
        f"{ACTOR}.megatron.context_parallel_size": 2,
        f"{ACTOR}.megatron.expert_model_parallel_size": 2,
        f"{ACTOR}.megatron.expert_tensor_parallel_size": 4,
    },
    "hf:d1+megatron:(attn:d4t2|ffn:t2e4)": {TRAINS: 8, f"{ACTOR}.megatron.expert_model_parallel_size": 4},
}

REFUSED = {
    "sglang:d4|fsdp:d8": "sglang:d4 has 4 and fsdp:d8 has 8",
    "sglang:d4+fsdp:d4+fsdp:d4": "one engine that generates and one that trains",
    "hf:d2": "one engine that generates and one that trains",
    "d4p1t2": "one engine that generates and one that trains",
    "": "takes letters with sizes",
    "hf:d2+": "takes letters with sizes",
    "hf:d1+fsdp:d2t2p2": "fsdp has no pipeline parallelism",
    "hf:d1+fsdp:d2e2": "fsdp has no expert parallelism",
    "hf:d1+megatron:(attn:d4t2|ffn:d4t4)": "attn has 8 processes",
    "hf:d1+megatron:(attn:d4p2|ffn:d4p1)": "attn has 8 processes",
    "hf:d1+fsdp:(attn:d4|ffn:d4)": "only megatron has separate sizes",
    "hf:d4e2+fsdp:d4": "hf has no expert parallelism; it has d (data)",
    "hf:d4p2+fsdp:d4": "hf has no pipeline parallelism; it has d (data)",
    "hf:d1+fsdp:d0": "sizes of at least 1",
    "hf:d1+fsdp:d-1": "cannot be parsed",
    "hf:d1+fsdp:": "takes letters with sizes",
    "hf:d1+fsdp:2": "takes letters with sizes",
    "hf:d1+fsdp:x2": "fsdp has no x parallelism",
    "hf:d1+megatron:d2e3": "e3 does not divide",
    "hf:d1+fsdp:d2d2": "given twice",
    "deepspeed:d4+hf:d1": "unknown engine 'deepspeed'; choose from fsdp, megatron, hf, sglang, vllm",
    "hf:d99999999999+fsdp:d1": "takes letters with sizes",
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted(text: str) -> None:
    settings = allocation_settings(text, 1)
    assert ACCEPTED[text].items() <= settings.items()


@pytest.mark.parametrize("text", REFUSED)
def test_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        allocation_settings(text, 1)
    assert REFUSED[text] in str(caught.value)


sizes = st.integers(1, 8)


@given(d=sizes, t=sizes, train=sizes, c=sizes, spaces=st.sampled_from(["", " "]))
def test_processes_are_the_product_of_the_sizes(d: int, t: int, train: int, c: int, spaces: str) -> None:
    settings = allocation_settings(f"vllm:d{d}t{t}{spaces}+{spaces}fsdp:c{c}d{train}t{t}", 1)
    assert settings == {
        TRAINS: train * c * t,
        SPLIT: t,
        GENERATES: d * t,
        f"{ROLLOUT}.name": "vllm",
        TENSOR: t,
        f"{ACTOR}.ulysses_sequence_parallel_size": c,
    }


def test_a_split_allocation_makes_two_pools() -> None:
    cfg = load_config(["trainer.allocation_mode=hf:d3+fsdp:d2", "trainer.max_staleness=1"])
    pools = resolve_pools(cfg)
    assert (pools.train_ranks, pools.rollout_ranks, pools.colocated, pools.total_ranks) == (2, 3, False, 5)
    assert (cfg.trainer.n_gpus_per_node, cfg.trainer.rollout_workers) == (2, 3)


def test_a_shared_allocation_makes_one_pool() -> None:
    cfg = load_config(["trainer.allocation_mode=hf[r]:d2|fsdp[a]:d2"])
    pools = resolve_pools(cfg)
    assert (pools.train_ranks, pools.rollout_ranks, pools.colocated, pools.total_ranks) == (2, 2, True, 2)


def test_an_allocation_is_spread_over_nodes_and_says_the_parallel_sizes() -> None:
    cfg = load_config(["trainer.allocation_mode=hf:d1+fsdp:d2c2", "trainer.nnodes=2"])
    assert cfg.trainer.n_gpus_per_node == 2
    assert cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size == 2
    assert cfg.actor_rollout_ref.ref.ulysses_sequence_parallel_size == 2
    cfg = load_config(["trainer.allocation_mode=hf:d4|fsdp:d2t2"])
    sections = (cfg.actor_rollout_ref.actor.fsdp_config, cfg.actor_rollout_ref.ref.fsdp_config)
    assert [section.tensor_parallel_size for section in sections] == [2, 2]
    assert plan_batches(cfg).actor.dp_size == 2
    cfg = load_config(["trainer.allocation_mode=hf:d1+megatron:d2c2"])
    assert cfg.trainer.n_gpus_per_node == 4
    assert cfg.actor_rollout_ref.actor.megatron.context_parallel_size == 2
    assert cfg.actor_rollout_ref.ref.megatron.context_parallel_size == 2
    assert plan_batches(cfg).actor.dp_size == 2


def test_experts_stay_whole_where_parts_of_them_would_not_divide_the_ranks_of_an_allocation() -> None:
    cfg = load_config(["trainer.allocation_mode=hf:d4+megatron:d2t4e4", "trainer.max_staleness=1"])
    assert cfg.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size == 1
    cfg = load_config(["trainer.allocation_mode=hf:d4+megatron:d4t4e4", "trainer.max_staleness=1"])
    assert cfg.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size is None


@pytest.mark.parametrize("nnodes", [(), ("trainer.nnodes=4",)])
def test_an_allocation_trains_on_as_many_nodes_of_the_size_that_is_set_as_it_needs(nnodes: tuple[str, ...]) -> None:
    settings = ["trainer.allocation_mode=hf:d16+fsdp:d32", "trainer.n_gpus_per_node=8", "trainer.max_staleness=1"]
    batches = ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    trainer = load_config([*settings, *batches, *nnodes]).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.rollout_workers) == (4, 8, 16)


@pytest.mark.parametrize(
    ("allocation", "says"),
    [("hf:d16+fsdp:d32", r"nnodes = 8: conflicts .* set trainer\.nnodes=4"), ("hf:d1+fsdp:d12", "n_gpus_per_node=6")],
)
def test_counts_that_do_not_fit_an_allocation_are_answered_with_what_does(allocation: str, says: str) -> None:
    counts = ["trainer.nnodes=8", "trainer.n_gpus_per_node=8"]
    with pytest.raises(ConfigError, match=says):
        load_config([f"trainer.allocation_mode={allocation}", *counts])
