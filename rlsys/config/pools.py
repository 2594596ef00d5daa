"""The processes that train and those that generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsys.config.compat.allocation import Allocation, Part, parse_allocation
from rlsys.config.engines import rollout_backend
from rlsys.config.schema.jobs import PPOConfig
from rlsys.utils.errors import ConfigError

MODE = "trainer.allocation_mode"
_ACTOR = "actor_rollout_ref.actor"
_ULYSSES = f"{_ACTOR}.ulysses_sequence_parallel_size"


@dataclass(frozen=True)
class Pools:
    """The numbers of processes by task. Actor, critic and reference share the training processes.

    `colocated`: the training processes also generate, and `rollout_ranks` is their number. Otherwise `rollout_ranks`
    separate processes generate, or with `external` none: servers outside of the run do. `reward_model_ranks` is 0 if
    the reward model shares the training processes.
    """

    nodes: int
    train_per_node: int
    train_ranks: int
    rollout_ranks: int
    colocated: bool
    reward_model_ranks: int
    external: bool = False

    @property
    def total_ranks(self) -> int:
        return self.train_ranks + (0 if self.colocated else self.rollout_ranks) + self.reward_model_ranks


def resolve_pools(cfg: PPOConfig) -> Pools:
    """The pools of a loaded configuration (loading has already turned trainer.allocation_mode into counts)."""
    trainer, grader = cfg.trainer, cfg.reward.reward_model
    train_ranks = trainer.nnodes * trainer.n_gpus_per_node
    external = is_external(cfg.actor_rollout_ref.rollout.name)
    own_pool = grader.enable and grader.enable_resource_pool
    return Pools(
        nodes=trainer.nnodes,
        train_per_node=trainer.n_gpus_per_node,
        train_ranks=train_ranks,
        rollout_ranks=0 if external else trainer.rollout_workers or train_ranks,
        colocated=trainer.rollout_workers == 0 and not external,
        reward_model_ranks=grader.nnodes * grader.n_gpus_per_node if own_pool else 0,
        external=external,
    )


def is_external(name: object) -> bool:
    """Whether a rollout engine of this name runs on external servers."""
    return isinstance(name, str) and rollout_backend(name).is_external


def allocation_counts(text: str, nnodes: int) -> dict[str, Any]:
    """The keys that an allocation sets: training processes per node, rollout workers, engine and parallel sizes.

    ConfigError if it is not one part that generates and one part of fsdp or megatron.
    """
    allocation = parse_allocation(text)
    train, generate = _two_parts(allocation, text)
    if train.world % nnodes:
        raise ConfigError(
            f"'{text}': {train} has {train.world} processes, which do not divide evenly over {nnodes} nodes"
        )
    if train.backend == "fsdp" and train.dims.t > 1:
        raise ConfigError(f"'{text}': tensor parallelism in {train} is not supported; set fsdp:d{train.world}")
    return {
        "trainer.n_gpus_per_node": train.world // nnodes,
        "trainer.rollout_workers": 0 if len(allocation.groups) == 1 else generate.world,
        **(_engine_sizes(generate) if generate.backend != "hf" else {}),
        **(_megatron_sizes(train) if train.backend == "megatron" else {_ULYSSES: train.dims.c}),
    }


def _engine_sizes(generate: Part) -> dict[str, Any]:
    if generate.dims.p > 1:
        raise ConfigError(f"pipeline parallelism in {generate} is not supported; use only d and t")
    return {
        "actor_rollout_ref.rollout.name": generate.backend,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": generate.dims.t,
    }


def _megatron_sizes(train: Part) -> dict[str, Any]:
    sizes, experts = train.dims, train.ffn or train.dims
    key = f"{_ACTOR}.megatron"
    return {
        f"{_ACTOR}.strategy": "megatron",
        f"{key}.tensor_model_parallel_size": sizes.t,
        f"{key}.pipeline_model_parallel_size": sizes.p,
        f"{key}.context_parallel_size": sizes.c,
        f"{key}.expert_model_parallel_size": experts.e,
        **({f"{key}.expert_tensor_parallel_size": train.ffn.t} if train.ffn else {}),
    }


def _two_parts(allocation: Allocation, text: str) -> tuple[Part, Part]:
    for part in allocation.parts:
        if part.backend == "archon":
            raise ConfigError(f"'{text}': archon is not supported; set fsdp:d{part.world}")
    train = [part for part in allocation.parts if part.trains]
    generate = [part for part in allocation.parts if not part.trains]
    if len(train) != 1 or len(generate) != 1:
        raise ConfigError(f"'{text}': set one engine that generates and one that trains, e.g. hf:d2+fsdp:d2")
    return train[0], generate[0]
