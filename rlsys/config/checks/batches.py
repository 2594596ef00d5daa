"""Whether batches divide evenly and sequences fit into token budgets."""

from collections.abc import Iterator

from rlsys.config.checks.files import model_facts
from rlsys.config.checks.findings import ACTOR, CRITIC, REF, Note, wrong
from rlsys.config.plan import shared_by
from rlsys.config.pools import resolve_pools
from rlsys.config.schema.actor import ActorConfig, CriticConfig, RefConfig
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import PPOConfig, SupervisedConfig, TrainedConfig
from rlsys.config.schema.model import ModelConfig, ShardConfig
from rlsys.config.schema.types import MicroBatches

ROLLOUT, LOG_PROB = "actor_rollout_ref.rollout", "log_prob_max_token_len_per_gpu"
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
"""What tensor parallelism divides, by its name in config.json."""


def check_ppo_batches(cfg: PPOConfig) -> Iterator[str]:
    """Prompts into mini-batches, mini-batches over ranks, micro-batches into shares, sequences into budgets."""
    actor, ref, ranks = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref, resolve_pools(cfg).train_ranks
    yield from _role(cfg, ACTOR, actor)
    yield from _divides(cfg, f"{ACTOR}.fsdp_config", cfg.actor_rollout_ref.model, actor, actor.fsdp_config, ranks)
    if cfg.use_critic:
        critic = cfg.critic
        yield from _role(cfg, CRITIC, critic)
        yield from _divides(cfg, f"{CRITIC}.fsdp", critic.model, critic, critic.fsdp, ranks)
    for own in {ranks, resolve_pools(cfg).teacher_ranks or ranks} if cfg.use_ref_settings else ():
        yield from _divides(cfg, f"{REF}.fsdp_config", cfg.actor_rollout_ref.reference_model, ref, ref.fsdp_config, own)
    yield from _budgets(cfg)
    batch = cfg.data.train_batch_size
    if cfg.data.gen_batch_size != batch and not cfg.algorithm.filter_groups.enable:
        why = "without algorithm.filter_groups.enable=true every generated prompt is trained on; remove it, or"
        yield wrong(cfg, "data.gen_batch_size", f"{why} set data.gen_batch_size={batch}")
    yield from _enough_rows(cfg)


def _role(cfg: PPOConfig, role: str, section: ActorConfig | CriticConfig) -> Iterator[str]:
    """Mini-batches of a trained role, and their shares of each rank."""
    prompts, mini, key = cfg.data.train_batch_size, section.ppo_mini_batch_size, f"{role}.ppo_mini_batch_size"
    if mini > prompts:
        yield wrong(cfg, key, f"more prompts than data.train_batch_size={prompts}", prompts)
    elif prompts % mini:
        near = max(size for size in range(1, mini) if prompts % size == 0)
        yield wrong(cfg, key, f"does not divide data.train_batch_size={prompts}", near)
    answers, (groups, odd) = cfg.actor_rollout_ref.rollout.n, divmod(resolve_pools(cfg).train_ranks, shared_by(section))
    samples, groups = mini * answers, max(groups, 1)
    if samples % groups and not odd:  # else the sizes are wrong, which other checks report
        why = f"times actor_rollout_ref.rollout.n={answers} gives {samples} samples, which {groups} data-parallel ranks"
        least = next(prompts for prompts in range(1, groups + 1) if prompts * answers % groups == 0)
        yield wrong(cfg, key, f"{why} cannot share evenly; set a multiple of {least}")
    elif not section.use_dynamic_bsz and (section.ppo_micro_batch_size_per_gpu or 1) > (share := samples // groups):
        yield wrong(cfg, f"{role}.ppo_micro_batch_size_per_gpu", f"a rank's mini-batch has only {share} samples", share)


def _divides(
    cfg: Section, key: str, model: ModelConfig, role: TrainedConfig | RefConfig, shard: ShardConfig, ranks: int
) -> Iterator[str]:
    """Ranks over copies, sequences and matrices of a model; `key` is the section of `shard`."""
    why, sequence = f"does not divide the {ranks} training processes", role.ulysses_sequence_parallel_size
    size = shard.tensor_parallel_size
    copy = min(shard.fsdp_size, ranks) if shard.fsdp_size > 0 else ranks
    if ranks % sequence:
        yield wrong(cfg, f"{key.rpartition('.')[0] or key}.ulysses_sequence_parallel_size", why, 1)
    if ranks % copy:
        yield wrong(cfg, f"{key}.fsdp_size", why, -1)
    counts = {"ranks of a copy": copy, "ranks for each of a sequence": ranks // sequence}
    facts = model_facts(model.path) if size > 1 else {}
    counts |= {name: n for name, n in facts.items() if name in SPLIT and isinstance(n, int)}
    if odd := [f"{name}={n}" for name, n in counts.items() if n % size]:
        yield wrong(cfg, f"{key}.tensor_parallel_size", f"does not divide {odd[0]}", 1)


def _budgets(cfg: PPOConfig) -> Iterator[str]:
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    actor, ref, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref, cfg.actor_rollout_ref.rollout
    shared = sequence_ranks(actor)
    budgets = [
        (f"{ACTOR}.ppo_max_token_len_per_gpu", actor.training, shared),
        (f"{ROLLOUT}.{LOG_PROB}", rollout.scoring, shared),
    ]
    if cfg.use_ref_settings:
        cp, ulysses = cfg.teacher_policy.ref.megatron.context_parallel_size, ref.ulysses_sequence_parallel_size
        budgets.append((f"{REF}.{LOG_PROB}", ref.scoring, cp if actor.strategy == "megatron" else ulysses))
    if cfg.use_critic:
        for name, size in (("ppo", cfg.critic.training), ("forward", cfg.critic.scoring)):
            budgets.append((f"{CRITIC}.{name}_max_token_len_per_gpu", size, sequence_ranks(cfg.critic)))
    if cfg.reward.reward_model.enable:
        budgets.append(("reward.reward_model.forward_max_token_len_per_gpu", cfg.reward.reward_model.scoring, 1))
    for key, size, sequence in budgets:
        if size.max_tokens is not None and size.max_tokens * sequence < longest:
            why = f"a sequence of data.max_prompt_length + data.max_response_length = {longest} tokens does not fit"
            yield wrong(cfg, key, why, f"{-(-longest // sequence)} or more")
    if whole := [key.rpartition(".")[0] for key, size, _ in budgets if size == MicroBatches()]:
        why = "a rank's whole share is one micro-batch; set a micro_batch_size_per_gpu, or use_dynamic_bsz=true"
        yield Note(f"{', '.join(dict.fromkeys(whole))}: use_dynamic_bsz=false without a number of samples: {why}")


def sequence_ranks(role: TrainedConfig) -> int:
    """Ranks that share each sequence."""
    return role.megatron.context_parallel_size if role.strategy == "megatron" else role.ulysses_sequence_parallel_size


def _enough_rows(cfg: PPOConfig | SupervisedConfig) -> Iterator[str]:
    rows, batch = cfg.data.train_max_samples, cfg.data.train_batch_size
    if 0 < rows < batch:
        why = f"fewer rows than data.train_batch_size={batch}; set data.train_batch_size={rows} or less"
        yield wrong(cfg, "data.train_max_samples", why)


def check_supervised_batches(cfg: SupervisedConfig) -> Iterator[str]:
    """Rows over ranks, and texts into budgets."""
    data, ranks = cfg.data, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    sequence, groups = sequence_ranks(cfg.engine), max(ranks // shared_by(cfg.engine), 1)
    yield from _divides(cfg, "engine", cfg.model, cfg.engine, cfg.engine, ranks)
    share = data.train_batch_size // groups
    if data.train_batch_size % groups:
        yield wrong(cfg, "data.train_batch_size", f"set a multiple of {groups}, the data-parallel ranks")
    elif not data.use_dynamic_bsz and data.micro_batch_size_per_gpu > share:
        yield wrong(cfg, "data.micro_batch_size_per_gpu", f"a rank's share of a batch is only {share} rows", share)
    if data.use_dynamic_bsz and data.max_token_len_per_gpu * sequence < data.max_length:
        why = f"a text of data.max_length={data.max_length} tokens does not fit"
        yield wrong(cfg, "data.max_token_len_per_gpu", why, -(-data.max_length // sequence))
    yield from _enough_rows(cfg)
