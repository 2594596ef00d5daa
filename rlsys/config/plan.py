"""The arithmetic of a run: what one step consists of and which processes run it, printed before the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rlsys.config.pools import Pools, resolve_pools
from rlsys.config.schema.actor import ActorConfig, CriticConfig
from rlsys.config.schema.base import Section
from rlsys.config.schema.jobs import PPOConfig, SupervisedConfig, TrainedConfig
from rlsys.config.schema.model import ShardConfig
from rlsys.config.schema.trainer import RunConfig, TrainingConfig
from rlsys.config.schema.types import MicroBatches
from rlsys.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """How a trained role (actor or critic) splits a step's samples.

    `dp_size` ranks see different samples; `samples` and `mini_batch_samples` count over all of them.
    """

    samples: int
    mini_batch_samples: int
    dp_size: int
    epochs: int
    size: MicroBatches

    @property
    def mini_batches(self) -> int:
        return self.samples // self.mini_batch_samples

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs

    @property
    def rank_samples(self) -> int:
        """Samples of a mini-batch on one rank."""
        return self.mini_batch_samples // self.dp_size

    @property
    def micro_batch_samples(self) -> int | None:
        """Samples of a micro-batch on one rank; None if it is filled by tokens."""
        return None if self.size.max_tokens is not None else self.size.rows or self.rank_samples

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a mini-batch on one rank; None if tokens fill them, so that only the lengths decide."""
        micro = self.micro_batch_samples
        return None if micro is None else -(-self.rank_samples // micro)


@dataclass(frozen=True)
class BatchPlan:
    """What one step of PPO consists of; `critic` is None where there is none."""

    samples: int
    actor: RolePlan
    critic: RolePlan | None
    pools: Pools


def shared_by(role: TrainedConfig) -> int:
    """Ranks that work on the same samples: they share sequences, matrices, and with Megatron layers too."""
    if isinstance(role.shard, ShardConfig):
        return role.ulysses_sequence_parallel_size * role.shard.tensor_parallel_size
    sizes = role.megatron
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def plan_batches(cfg: PPOConfig) -> BatchPlan:
    """The plan of a loaded configuration."""
    answers, pools = cfg.actor_rollout_ref.rollout.n, resolve_pools(cfg)
    rows = cfg.data.train_batch_size * answers

    def plan_of(role: ActorConfig | CriticConfig) -> RolePlan:
        mini, dp = role.ppo_mini_batch_size * answers, pools.train_ranks // shared_by(role)
        return RolePlan(samples=rows, mini_batch_samples=mini, dp_size=dp, epochs=role.ppo_epochs, size=role.training)

    return BatchPlan(rows, plan_of(cfg.actor_rollout_ref.actor), plan_of(cfg.critic) if cfg.use_critic else None, pools)


def check_enough_rows(num_rows: int, batch_size: int) -> None:
    """ConfigError if the training files have fewer usable rows than a batch."""
    if num_rows < batch_size:
        fix = "set data.train_batch_size (and data.gen_batch_size, if you set it) lower, or add rows"
        rows = _many(num_rows, "usable row")
        raise ConfigError(f"data.train_files have {rows}, fewer than a batch of {batch_size}: {fix}")


def total_steps(num_rows: int, batch_size: int, total_epochs: int, total_training_steps: int | None) -> int:
    """Steps of a run over `num_rows` rows: the whole batches of each epoch (the rest is left out), or what is asked."""
    return total_training_steps if total_training_steps is not None else num_rows // batch_size * total_epochs


def plan_text(cfg: Section, facts: Mapping[str, str] = MappingProxyType({})) -> str:
    """The plan of any job as people read it, a line for each subject.

    `facts` are what no setting says: "data" and "validation", and of a PPO job "memory", "time",
    "layouts" and the "sizes" that were chosen; "processes" says where their number is from.
    """
    lines = [(name, facts.get(name, "")) for name in ("data", "validation")]
    if isinstance(cfg, PPOConfig | SupervisedConfig):
        lines += _ppo_lines(cfg, facts) if isinstance(cfg, PPOConfig) else _supervised_lines(cfg, facts)
        lines.append(("output", str(Path(cfg.trainer.default_local_dir).absolute())))
    return "\n".join(f"  {name:<11}{words}" for name, words in lines if words)


def _ppo_lines(cfg: PPOConfig, facts: Mapping[str, str]) -> list[tuple[str, str]]:
    plan, rollout = plan_batches(cfg), cfg.actor_rollout_ref.rollout
    data = cfg.data
    tokens = f"{data.max_prompt_length} + {data.max_response_length} tokens at most"
    generated = f", generated {data.gen_batch_size} prompts at a time" if cfg.algorithm.filter_groups.enable else ""
    by = ""
    if plan.pools.external:
        is_broadcast = rollout.checkpoint_engine.backend == "nccl"
        by = "; over a process group" if is_broadcast else "; in files, which the servers must see"
    return [
        ("step", f"{data.train_batch_size} prompts x {rollout.n} = {plan.samples} samples of {tokens}{generated}"),
        ("actor", _role_words(plan.actor, "actor_rollout_ref.actor")),
        ("critic", _role_words(plan.critic, "critic") if plan.critic else "none"),
        ("reference", "yes, for the KL term" if cfg.use_reference else "none"),
        ("teachers", ", ".join(model.path or "" for model in cfg.teachers.values())),
        ("advantages", f"{cfg.algorithm.adv_estimator}; loss {cfg.actor_rollout_ref.actor.policy_loss.loss_mode}"),
        ("length", _length_words(cfg.trainer, data.train_batch_size)),
        ("workers", _worker_words(cfg.trainer, facts, plan.pools)),
        *((name, facts.get(name, "")) for name in ("memory", "sizes", "time", "layouts")),
        ("weights", _weights_words(cfg.trainer.max_staleness, cfg.trainer.sync_freq) + by),
    ]


def _supervised_lines(cfg: SupervisedConfig, facts: Mapping[str, str]) -> list[tuple[str, str]]:
    rows = cfg.data.train_batch_size
    dp = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node // shared_by(cfg.engine)
    role = RolePlan(samples=rows, mini_batch_samples=rows, dp_size=dp, epochs=1, size=cfg.data.training)
    return [
        ("step", f"{rows} rows of {cfg.data.max_length} tokens at most; {_rank_words(role)}"),
        ("length", _length_words(cfg.trainer, rows)),
        ("workers", _worker_words(cfg.trainer, facts)),
    ]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith(('batch', 'process')) else 's'}"


def _role_words(role: RolePlan, section: str) -> str:
    epochs = f" x {role.epochs} epochs" if role.epochs > 1 else ""
    steps = f"{_many(role.mini_batches, 'mini-batch')} of {role.mini_batch_samples} samples{epochs}"
    key = f"{section}.ppo_micro_batch_size_per_gpu"
    less = f" ({key}=1 uses the least memory)" if role.size == MicroBatches() else ""
    return f"{steps} = {_many(role.optimizer_steps, 'optimizer step')}; {_rank_words(role)}{less}"


def _rank_words(role: RolePlan) -> str:
    micro = f"micro-batches of {role.size.max_tokens} tokens"
    if role.micro_batches is not None:
        micro = f"{_many(role.micro_batches, 'micro-batch')} of {role.micro_batch_samples}"
    return f"each rank: {role.rank_samples} in {micro}"


def _length_words(run: TrainingConfig, batch: int) -> str:
    epochs = f"{_many(run.total_epochs, 'epoch')} of (rows / {batch}) steps"
    return epochs if run.total_training_steps is None else _many(run.total_training_steps, "step")


def _worker_words(trainer: RunConfig, facts: Mapping[str, str], pools: Pools | None = None) -> str:
    where = {"auto": "GPU where there is one, else CPU", "cpu": "CPU", "cuda": "GPU"}[trainer.device]
    more = ""
    if pools:
        servers = "external servers" if pools.external else pools.rollout_ranks
        more = " and generation" if pools.colocated else f", {servers} for generation"
        more += f", {pools.reward_model_ranks} for the reward model" if pools.reward_model_ranks else ""
        more += f", {pools.teacher_ranks} for the teachers" if pools.teacher_ranks else ""
    backend = "Ray actors" if trainer.backend == "ray" else "in this process"
    processes = f"{_many(trainer.nnodes, 'node')} x {_many(trainer.n_gpus_per_node, 'process')}"
    return f"{processes} for training{more} ({'; '.join(filter(None, (where, backend, facts.get('processes'))))})"


def _weights_words(max_staleness: int, sync_freq: int) -> str:
    pushed = "after every step" if sync_freq == 1 else f"every {sync_freq} steps"
    behind = "samples always come from the newest weights" if max_staleness == 0 else f"at most {max_staleness} behind"
    return f"pushed to the rollout {pushed}; {behind if sync_freq == 1 or max_staleness else 'then held'}"
