"""The allocation grammar: AReaL's acceptance table, with its unfriendly or wrong answers put right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config import load_config, resolve_pools
from rlsys.config.compat.allocation import Allocation, Dims, Part, parse_allocation
from rlsys.config.plan import plan_batches
from rlsys.utils.errors import ConfigError

ACCEPTED = {
    "sglang:d4p1t1+fsdp:d4": (8, [["sglang"], ["fsdp"]]),
    "vllm:d2t4+megatron:d2t2p2": (16, [["vllm"], ["megatron"]]),
    "sglang[r]:d4 + fsdp[a]:d2c2": (8, [["sglang"], ["fsdp"]]),
    "sglang[rollout]:d8|fsdp[actor]:d8": (8, [["sglang", "fsdp"]]),
    "vllm[a]:d1t4|sglang[b]:d4|fsdp[c]:d2t2": (4, [["vllm", "sglang", "fsdp"]]),
    "sglang[r]:d4+fsdp[a]:d4|fsdp[c]:d4": (8, [["sglang"], ["fsdp", "fsdp"]]),
    "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)": (32, [["megatron"]]),
    "megatron:(attn:d4t2|ffn:t2e4)": (8, [["megatron"]]),
    "archon:d2t2p2c2e2": (16, [["archon"]]),
    "megatron:d2t2c2e4": (8, [["megatron"]]),
    "hf:d2+fsdp:d2": (4, [["hf"], ["fsdp"]]),
    "hf[r]:d2|fsdp[a]:d2": (2, [["hf", "fsdp"]]),
}

REFUSED = {
    "sglang:d8|fsdp:d8": "need names; use e.g. sglang[actor]:d8",
    "sglang[a]:d4|fsdp[b]:d8": "sglang[a]:d4 has 4 and fsdp[b]:d8 has 8",
    "sglang:d4+fsdp:d4+fsdp:d4": "three or more engines need names",
    "sglang[a]:d4+sglang[a]:d4+fsdp[b]:d4": "the name a is used twice",
    "d4p1t2": "has no engine; use e.g. fsdp:d4p1t2",
    "sglang:d4+d4": "'d4' has no engine",
    "[actor]:d4": "has no engine; use e.g. fsdp:d4",
    "fsdp:d2t2p2": "fsdp has no pipeline parallelism",
    "fsdp:d2e2": "fsdp has no expert parallelism",
    "megatron:(attn:d4t2|ffn:d4t4)": "attn:d4t2 has 8 processes and ffn:d4t4 has 16",
    "megatron:(attn:d4p2|ffn:d4p1)": "attn has p2 but ffn has p1",
    "fsdp:(attn:d4|ffn:d4)": "have the form megatron:(attn:",
    "sglang:d4e2": "sglang has no expert parallelism; it takes d (data), t (tensor), p (pipeline)",
    "fsdp:d0": "an integer of at least 1",
    "fsdp:d-1": "an integer of at least 1",
    "fsdp:": "fsdp needs sizes, e.g. fsdp:d2",
    "fsdp:2": "fsdp needs sizes",
    "fsdp:x2": "'x' is not a dimension",
    "megatron:d2e3": "e3 does not divide the 2 ranks",
    "fsdp:d2d2": "d is given twice",
    "sglang.d4p1t1+d4p1t1": "the old form; use sglang:d4p1t1",
    "deepspeed:d4": "unknown engine 'deepspeed'; choose from hf, sglang, vllm, fsdp, megatron",
    "": "an allocation is e.g. hf:d2+fsdp:d2",
    "hf:d2+": "'nothing' has no engine",
    "hf[1x]:d2": "'1x' is not a valid name",
    "hf:d99999999999": "an integer of at least 1",
}


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted(text: str) -> None:
    world, backends = ACCEPTED[text]
    allocation = parse_allocation(text)
    assert allocation.world == world
    assert [[part.backend for part in group] for group in allocation.groups] == backends


@pytest.mark.parametrize("text", REFUSED)
def test_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_allocation(text)
    assert REFUSED[text] in str(caught.value)


def test_expert_layers_keep_their_own_tensor_size() -> None:
    part = parse_allocation("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)").parts[0]
    assert part.dims == Dims(d=4, t=2, p=2, c=2)
    assert part.ffn == Dims(d=2, t=4, p=2, e=2)


sizes = st.integers(1, 8)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    backend, letters = draw(st.sampled_from([("hf", "d"), ("vllm", "dtp"), ("fsdp", "dtc"), ("megatron", "dtpc")]))
    return Part(backend, "", Dims(**{letter: draw(sizes) for letter in letters}))


@settings(deadline=None)
@given(st.lists(parts(), min_size=1, max_size=5))
def test_every_allocation_reads_back(allocated: list[Part]) -> None:
    named = tuple((Part(part.backend, f"e{at}", part.dims),) for at, part in enumerate(allocated))
    allocation = Allocation(named)
    assert parse_allocation(str(allocation)) == allocation
    assert parse_allocation(f"  {' + '.join(str(group[0]) for group in named)} ") == allocation


@pytest.mark.parametrize("text", [text for text in ACCEPTED if "archon" not in text])
def test_accepted_text_reads_back(text: str) -> None:
    allocation = parse_allocation(text)
    assert parse_allocation(str(allocation)) == allocation


def test_a_split_allocation_makes_two_pools() -> None:
    cfg = load_config(["trainer.allocation_mode=hf:d3+fsdp:d2", "trainer.max_staleness=1"])
    pools = resolve_pools(cfg)
    assert (pools.train_ranks, pools.rollout_ranks, pools.colocated, pools.total_ranks) == (2, 3, False, 5)
    assert (cfg.trainer.n_gpus_per_node, cfg.trainer.rollout_workers) == (2, 3)
    assert cfg.actor_rollout_ref.hybrid_engine is False


def test_a_shared_allocation_makes_one_pool() -> None:
    cfg = load_config(["trainer.allocation_mode=hf[r]:d2|fsdp[a]:d2"])
    pools = resolve_pools(cfg)
    assert (pools.train_ranks, pools.rollout_ranks, pools.colocated, pools.total_ranks) == (2, 2, True, 2)
    assert cfg.actor_rollout_ref.hybrid_engine is True


def test_an_allocation_is_spread_over_nodes_and_says_the_sequence_parallelism() -> None:
    cfg = load_config(["trainer.allocation_mode=hf:d1+fsdp:d2c2", "trainer.nnodes=2"])
    assert cfg.trainer.n_gpus_per_node == 2
    assert cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size == 2
    assert cfg.actor_rollout_ref.ref.ulysses_sequence_parallel_size == 2
    cfg = load_config(["trainer.allocation_mode=hf:d1+megatron:d2c2"])
    assert cfg.trainer.n_gpus_per_node == 4
    assert cfg.actor_rollout_ref.actor.megatron.context_parallel_size == 2
    assert cfg.actor_rollout_ref.ref.megatron.context_parallel_size == 2
    assert plan_batches(cfg).actor.dp_size == 2
