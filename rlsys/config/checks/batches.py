"""Whether batches divide evenly and sequences fit into token budgets."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.config.checks.findings import wrong
from rlsys.config.plan import shared_by
from rlsys.config.pools import resolve_pools
from rlsys.config.schema.actor import ActorConfig, CriticConfig
from rlsys.config.schema.data import DataConfig, SupervisedDataConfig
from rlsys.config.schema.jobs import PPOConfig, SupervisedConfig
from rlsys.config.schema.model import RoleShardConfig, ShardConfig

ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
ROLLOUT, LOG_PROB = "actor_rollout_ref.rollout", "log_prob_max_token_len_per_gpu"


def check_ppo_batches(cfg: PPOConfig) -> Iterator[str]:
    """Prompts into mini-batches, mini-batches over ranks, micro-batches into shares, sequences into budgets."""
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    ranks = resolve_pools(cfg).train_ranks
    yield from _mini_batches(cfg, ACTOR, actor)
    yield from _ranks(ACTOR, "fsdp_config", actor.fsdp_config, actor.ulysses_sequence_parallel_size, ranks)
    yield from _micro_batches(cfg, ACTOR, actor, ranks)
    if cfg.use_critic:
        yield from _mini_batches(cfg, CRITIC, cfg.critic)
        yield from _ranks(CRITIC, "fsdp", cfg.critic.fsdp, cfg.critic.ulysses_sequence_parallel_size, ranks)
        yield from _micro_batches(cfg, CRITIC, cfg.critic, ranks)
    if cfg.use_reference:
        yield from _ranks(REF, "fsdp_config", ref.fsdp_config, ref.ulysses_sequence_parallel_size, ranks)
    if actor.ulysses_sequence_parallel_size > 1 and not cfg.actor_rollout_ref.model.use_remove_padding:
        key = "actor_rollout_ref.model.use_remove_padding"
        yield wrong(key, False, f"sequences are split over ranks only when packed; set {key}=true")
    yield from _budgets(cfg)
    yield from _generated(cfg)


def _mini_batches(cfg: PPOConfig, role: str, section: ActorConfig | CriticConfig) -> Iterator[str]:
    prompts, mini = cfg.data.train_batch_size, section.ppo_mini_batch_size
    key = f"{role}.ppo_mini_batch_size"
    if mini > prompts:
        yield wrong(key, mini, f"more prompts than data.train_batch_size={prompts}; set {key}={prompts}")
    elif prompts % mini:
        near = max(size for size in range(1, mini) if prompts % size == 0)
        yield wrong(key, mini, f"does not divide data.train_batch_size={prompts}; set {key}={near}")


def _divides(role: str, sharding: str, shard: ShardConfig, sequence: int, ranks: int) -> Iterator[str]:
    for key, size, rest, instead in (
        (f"{role}.ulysses_sequence_parallel_size", sequence, ranks % sequence, 1),
        (f"{sharding}.fsdp_size", shard.fsdp_size, ranks % shard.fsdp_size if shard.fsdp_size > 0 else 0, -1),
    ):
        if rest or size == 0:
            yield wrong(key, size, f"does not divide the {ranks} training processes; set {key}={instead}")


def _ranks(role: str, sharding: str, shard: RoleShardConfig, sequence: int, ranks: int) -> Iterator[str]:
    yield from _divides(role, f"{role}.{sharding}", shard, sequence, ranks)
    if shard.param_offload and shard.offload_policy:
        yield wrong(
            f"{role}.{sharding}.offload_policy", True, "it already offloads parameters; set param_offload=false"
        )


def _micro_batches(cfg: PPOConfig, role: str, section: ActorConfig | CriticConfig, ranks: int) -> Iterator[str]:
    answers = cfg.actor_rollout_ref.rollout.n
    groups = max(ranks // shared_by(section), 1)
    samples = section.ppo_mini_batch_size * answers
    key = f"{role}.ppo_mini_batch_size"
    if samples % groups:
        yield wrong(
            key,
            section.ppo_mini_batch_size,
            f"times actor_rollout_ref.rollout.n={answers} gives {samples} samples, which {groups} data-parallel ranks "
            f"cannot share evenly; set a multiple of {groups}",
        )
        return
    micro, share = section.ppo_micro_batch_size_per_gpu, samples // groups
    micro_key = f"{role}.ppo_micro_batch_size_per_gpu"
    if micro is not None and not section.use_dynamic_bsz and micro > share:
        yield wrong(
            micro_key, micro, f"a rank's share of a mini-batch is only {share} samples; set {micro_key}={share}"
        )


def _budgets(cfg: PPOConfig) -> Iterator[str]:
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    actor, ref, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref, cfg.actor_rollout_ref.rollout
    shared = _sequence_ranks(actor)
    budgets = [
        (f"{ACTOR}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu, actor.use_dynamic_bsz, shared),
        (f"{ROLLOUT}.{LOG_PROB}", rollout.log_prob_max_token_len_per_gpu, rollout.log_prob_use_dynamic_bsz, shared),
    ]
    if cfg.use_reference:
        cp, ulysses = ref.megatron.context_parallel_size, ref.ulysses_sequence_parallel_size
        dynamic, sequence = ref.log_prob_use_dynamic_bsz, cp if actor.strategy == "megatron" else ulysses
        budgets.append((f"{REF}.{LOG_PROB}", ref.log_prob_max_token_len_per_gpu, dynamic, sequence))
    if cfg.use_critic:
        dynamic, sequence = cfg.critic.use_dynamic_bsz, _sequence_ranks(cfg.critic)
        for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
            budgets.append((f"{CRITIC}.{name}", getattr(cfg.critic, name), dynamic, sequence))
    if cfg.reward.reward_model.enable:
        grader, key = cfg.reward.reward_model, "reward.reward_model.forward_max_token_len_per_gpu"
        budgets.append((key, grader.forward_max_token_len_per_gpu, grader.use_dynamic_bsz, 1))
    for key, budget, dynamic, sequence in budgets:
        if dynamic and budget * sequence < longest:
            yield wrong(key, budget, _too_small(longest, sequence, key))


def _sequence_ranks(role: ActorConfig | CriticConfig) -> int:
    """Ranks that share each sequence."""
    return role.megatron.context_parallel_size if role.strategy == "megatron" else role.ulysses_sequence_parallel_size


def _too_small(longest: int, sequence: int, key: str) -> str:
    need = -(-longest // sequence)
    return (
        f"a sequence of data.max_prompt_length + data.max_response_length = {longest} tokens does not fit; "
        f"set {key}={need} or more"
    )


def _generated(cfg: PPOConfig) -> Iterator[str]:
    data, groups = cfg.data, cfg.algorithm.filter_groups
    if data.gen_batch_size != data.train_batch_size and not groups.enable:
        yield wrong(
            "data.gen_batch_size",
            data.gen_batch_size,
            f"without algorithm.filter_groups.enable=true every generated prompt is trained on; set "
            f"data.gen_batch_size={data.train_batch_size} or remove it",
        )
    yield from _samples(data)


def _samples(data: DataConfig | SupervisedDataConfig) -> Iterator[str]:
    """How many rows of the files are used."""
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(data, name) == 0:
            yield wrong(f"data.{name}", 0, f"no rows would be left; set data.{name}=-1 for all")
    if 0 < data.train_max_samples < data.train_batch_size:
        why = f"fewer rows than data.train_batch_size={data.train_batch_size}"
        advice = f"set data.train_batch_size={data.train_max_samples} or less"
        yield wrong("data.train_max_samples", data.train_max_samples, f"{why}; {advice}")


def check_supervised_batches(cfg: SupervisedConfig) -> Iterator[str]:
    """Rows over ranks, and texts into budgets."""
    data = cfg.data
    ranks, sequence = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node, cfg.engine.ulysses_sequence_parallel_size
    yield from _divides("engine", "engine", cfg.engine, sequence, ranks)
    if ranks % sequence:
        return
    groups = ranks // sequence
    if data.train_batch_size % groups:
        why = f"{groups} data-parallel ranks cannot share it evenly; set a multiple of {groups}"
        yield wrong("data.train_batch_size", data.train_batch_size, why)
    elif not data.use_dynamic_bsz and data.micro_batch_size_per_gpu > data.train_batch_size // groups:
        share = data.train_batch_size // groups
        why = f"a rank's share of a batch is only {share} rows; set data.micro_batch_size_per_gpu={share}"
        yield wrong("data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu, why)
    if data.use_dynamic_bsz and data.max_token_len_per_gpu * sequence < data.max_length:
        need = -(-data.max_length // sequence)
        why = f"a text of data.max_length={data.max_length} tokens does not fit; set data.max_token_len_per_gpu={need}"
        yield wrong("data.max_token_len_per_gpu", data.max_token_len_per_gpu, why)
    yield from _samples(data)
