"""How much memory weights, gradients and optimizer state take, from a model's config.json; activations come on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.config.checks.files import model_facts
from rlsys.config.introspect import is_count
from rlsys.config.pools import resolve_pools
from rlsys.config.schema.jobs import PPOConfig
from rlsys.config.schema.model import ShardConfig

_NEEDED = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
_TRAINED_BYTES = 4 + 8
"""Bytes a parameter for gradients and Adam's two moments, in float32."""


def parameter_count(facts: Mapping[str, Any]) -> int | None:
    """Parameters of a dense Llama-shaped decoder; None where config.json does not describe one."""
    dense = not any(facts.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if not dense or not all(is_count(facts.get(key)) for key in _NEEDED):
        return None
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    head = facts["head_dim"] if is_count(facts.get("head_dim")) else hidden // heads
    groups = facts.get("num_key_value_heads")
    key_value = (groups if is_count(groups) else heads) * head
    attention = hidden * (heads * head) * 2 + hidden * key_value * 2
    if facts.get("attention_bias") or facts.get("model_type") == "qwen2":
        attention += heads * head + 2 * key_value
    if facts.get("model_type") == "qwen3":
        attention += 2 * head
    layer = attention + 3 * hidden * facts["intermediate_size"] + 2 * hidden
    embeddings = facts["vocab_size"] * hidden * (1 if facts.get("tie_word_embeddings", False) else 2)
    return facts["num_hidden_layers"] * layer + embeddings + hidden


def trained_bytes(parameters: int, shard: ShardConfig, *, ranks: int, held_bytes: int) -> int:
    """Bytes a rank holds of a trained role: its part of weights, gradients and optimizer state."""
    return parameters * (held_bytes + _TRAINED_BYTES) // (shard.fsdp_size if shard.fsdp_size > 0 else ranks)


def memory_words(cfg: PPOConfig) -> str:
    """The memory of each process in words; empty where the model is not here to be read."""
    policy, pools = cfg.actor_rollout_ref, resolve_pools(cfg)
    facts = model_facts(Path(policy.model.path)) if policy.model.path else {}
    parameters = parameter_count(facts | policy.model.override_config)
    if parameters is None:
        return ""
    shards = [policy.actor.fsdp_config, *([cfg.critic.fsdp] if cfg.use_critic else [])]
    train = sum(
        trained_bytes(parameters, shard, ranks=pools.train_ranks, held_bytes=_held_bytes(shard)) for shard in shards
    )
    if cfg.use_reference:
        ref = policy.ref.fsdp_config
        train += parameters * _held_bytes(ref) // (ref.fsdp_size if ref.fsdp_size > 0 else pools.train_ranks)
    generate = parameters * (2 if policy.rollout.dtype in ("bfloat16", "float16") else 4)
    shared = (
        f"{_gigabytes(train + generate)} a process"
        if pools.colocated
        else (f"{_gigabytes(train)} a training process, {_gigabytes(generate)} a generating one")
    )
    return f"{parameters / 1e6:.1f}M parameters: about {shared}, activations and caches not counted"


def _held_bytes(shard: ShardConfig) -> int:
    return 4 if shard.model_dtype == "float32" else 2


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
