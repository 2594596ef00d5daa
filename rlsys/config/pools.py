"""The processes that train and those that generate."""

from dataclasses import dataclass

from rlsys.config.schema.jobs import PPOConfig


@dataclass(frozen=True)
class Pools:
    """The numbers of processes by task. Actor, critic and reference share the training processes.

    `teacher_ranks` and `reward_model_ranks` are 0 where there is none, or where it shares the training processes.

    `colocated`: the training processes also generate, and `rollout_ranks` is their number. Otherwise `rollout_ranks`
    separate processes generate, or with `external` none: servers outside of the run do.
    """

    train_ranks: int
    rollout_ranks: int
    colocated: bool
    reward_model_ranks: int
    external: bool = False
    teacher_ranks: int = 0

    @property
    def total_ranks(self) -> int:
        generating = 0 if self.colocated else self.rollout_ranks
        return self.train_ranks + generating + self.reward_model_ranks + self.teacher_ranks


def resolve_pools(cfg: PPOConfig) -> Pools:
    """The pools of a loaded configuration (loading has already turned trainer.allocation_mode into counts)."""
    grader = cfg.reward.reward_model
    train_ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    external = cfg.actor_rollout_ref.rollout.is_external
    own_pool = grader.enable and grader.enable_resource_pool
    return Pools(
        train_ranks=train_ranks,
        rollout_ranks=0 if external else cfg.trainer.rollout_workers or train_ranks,
        colocated=cfg.trainer.rollout_workers == 0 and not external,
        reward_model_ranks=grader.nnodes * grader.n_gpus_per_node if own_pool else 0,
        external=external,
        teacher_ranks=cfg.distillation.nnodes * cfg.distillation.n_gpus_per_node if cfg.distillation.enabled else 0,
    )


def process_pools(cfg: PPOConfig, node_size: int) -> dict[str, list[int]]:
    """The processes of each pool by node, where the largest node has room for `node_size` of them.

    Each copy of a rollout engine may be on another node; one that is larger than a node is spread over whole nodes.
    """
    pools = resolve_pools(cfg)
    by_node = {"train": [cfg.trainer.n_gpus_per_node] * cfg.trainer.nnodes}
    if not pools.colocated and not pools.external:
        per_copy = cfg.actor_rollout_ref.rollout.replica_size
        copy = [min(node_size, per_copy - at) for at in range(0, per_copy, node_size)]
        by_node["rollout"] = copy * (pools.rollout_ranks // per_copy)
    if pools.reward_model_ranks:
        by_node["reward_model"] = [cfg.reward.reward_model.n_gpus_per_node] * cfg.reward.reward_model.nnodes
    if pools.teacher_ranks:
        by_node["teacher"] = [cfg.distillation.n_gpus_per_node] * cfg.distillation.nnodes
    return by_node


def min_nodes(cfg: PPOConfig) -> dict[str, int]:
    """The pools of `process_pools` that start with fewer of their nodes, and with how many."""
    least = cfg.actor_rollout_ref.rollout.min_replicas
    return {} if least is None else {"rollout": least}


def generates_ahead(cfg: PPOConfig) -> bool:
    """Whether prompts start before their step; if not, samples are only as old as trainer.sync_freq makes them."""
    trainer = cfg.trainer
    return trainer.max_staleness > (trainer.sync_freq - 1 if resolve_pools(cfg).colocated else 0)
