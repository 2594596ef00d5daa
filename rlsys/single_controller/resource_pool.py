"""Which ranks go where: pools of process slots on nodes, how they are split and merged, and whether a cluster has room.

Pure arithmetic; `rlsys.single_controller.ray` places it on a cluster.
"""

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from rlsys.utils.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for one rank of each group on a pool: process `index` of node `node` of the pool that reserved it."""

    origin: "ResourcePool"
    node: int
    index: int


class ResourcePool:
    """Slots for processes: `process_on_nodes[i]` of them on node i, shared by at most `max_colocate_count` groups."""

    def __init__(self, process_on_nodes: Sequence[int] = (), max_colocate_count: int = 10) -> None:
        if any(count < 1 for count in process_on_nodes):
            raise ConfigError(f"a resource pool needs at least one process on each node, got {list(process_on_nodes)}")
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.max_colocate_count = max_colocate_count
        self.slots = tuple(Slot(self, node, at) for node, count in enumerate(process_on_nodes) for at in range(count))

    @property
    def store(self) -> list[int]:
        """The number of slots on each node."""
        return list(Counter((id(slot.origin), slot.node) for slot in self.slots).values())

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def local_world_size_list(self) -> list[int]:
        """The number of slots on the node of each slot."""
        return [count for count in self.store for _ in range(count)]

    @property
    def local_rank_list(self) -> list[int]:
        """The place of each slot on its node."""
        return [rank for count in self.store for rank in range(count)]

    def with_slots(self, slots: Sequence[Slot]) -> Self:
        """A pool of the same kind over given slots; the reservation stays with the pool that made them."""
        part = copy.copy(self)
        part.slots = tuple(slots)
        return part


P = TypeVar("P", bound=ResourcePool)
KIND = ("max_colocate_count", "use_gpu", "accelerator_type", "num_cpus", "detached")
"""What pools that are merged must have in common."""


def split_resource_pool(resource_pool: P, split_size: int | Sequence[int]) -> list[P]:
    """Cut a pool into pools of `split_size` consecutive slots each (one size, or one for each part).

    ConfigError unless the sizes add up to the pool.
    """
    total = resource_pool.world_size
    sizes = [split_size] * (total // max(1, split_size)) if isinstance(split_size, int) else [*split_size]
    if sum(sizes) != total or any(size < 1 for size in sizes):
        raise ConfigError(f"a pool of {total} processes cannot be split into parts of {split_size}")
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [resource_pool.with_slots(resource_pool.slots[start : start + size]) for start, size in zip(starts, sizes)]


def merge_resource_pool(first: P, second: P) -> P:
    """One pool over the slots of both; ConfigError unless they are of one kind."""
    kinds = [(type(pool), *(getattr(pool, name, None) for name in KIND)) for pool in (first, second)]
    if kinds[0] != kinds[1]:
        raise ConfigError("only pools of one kind can be merged: same use_gpu, accelerator_type and max_colocate_count")
    return first.with_slots((*first.slots, *second.slots))


SECTIONS = {"train": "trainer", "reward_model": "reward.reward_model", "teacher": "distillation"}
"""Where the configuration has the nodes of a pool."""
KEYS = {"rollout": "trainer.rollout_workers", "first rollout": "actor_rollout_ref.rollout.min_replicas"}
"""Where it has the processes of others."""


@dataclass(frozen=True)
class NodeCapacity:
    """The resources of a node of the cluster."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class PoolNeed:
    """What a pool needs: on each of its nodes, that many processes with these resources each."""

    name: str
    process_on_nodes: tuple[int, ...]
    cpus_per_process: float
    gpus_per_process: float

    def __str__(self) -> str:
        """The keys that a pool of `rlsys.config.pools` is from, with their values; "first ..." is a part of a pool."""
        counts = self.process_on_nodes
        if section := SECTIONS.get(self.name):
            return f"{section}.nnodes={len(counts)} {section}.n_gpus_per_node={counts[0]}"
        key = KEYS.get(self.name, f"pool '{self.name}'")
        return f"{sum(counts)} of {key}: {', '.join(f'{n} x {k} on one node' for k, n in Counter(counts).items())}"


def check_capacity(needs: Sequence[PoolNeed], nodes: Sequence[NodeCapacity]) -> None:
    """ConfigError, with what to change, unless every pool's nodes fit on the cluster's together.

    The largest are placed first, each on the node that has most left, as Ray does. The error names the first part that
    no node has room for, and what each node has left.
    """
    free = [[node.num_gpus, node.num_cpus] for node in nodes]
    parts = [(count, need) for need in needs for count in need.process_on_nodes]
    wanted = [(n * need.gpus_per_process, n * need.cpus_per_process, n, need.name) for n, need in parts]
    for gpus, cpus, count, name in sorted(wanted, reverse=True):
        fitting = [node for node in free if node[0] >= gpus - 1e-6 and node[1] >= cpus - 1e-6]
        if not fitting:
            left = Counter(f"{node[1]:g} CPUs and {node[0]:g} GPUs" for node in free)
            on_each = ", ".join(f"{room} on {n} node(s)" for room, n in left.items())
            lacks = f"{count} process(es) of pool '{name}' with {cpus:g} CPUs and {gpus:g} GPUs: left are {on_each}"
            raise ConfigError(f"no node has room for {lacks}; {_no_room(needs, nodes)}")
        roomiest = max(fitting)
        roomiest[0] -= gpus
        roomiest[1] -= cpus


def _no_room(needs: Sequence[PoolNeed], nodes: Sequence[NodeCapacity]) -> str:
    has = f"{sum(n.num_cpus for n in nodes):g} CPUs and {sum(n.num_gpus for n in nodes):g} GPUs on {len(nodes)} node(s)"
    has += f" (at most {max(n.num_cpus for n in nodes):g} and {max(n.num_gpus for n in nodes):g} on one)"
    cpus = sum(sum(need.process_on_nodes) * need.cpus_per_process for need in needs)
    gpus = sum(sum(need.process_on_nodes) * need.gpus_per_process for need in needs)
    wanted = f"{cpus:g} CPUs and {gpus:g} GPUs ({'; '.join(map(str, needs))})"
    how = "add nodes, use trainer.device=cpu without GPUs, or start Ray with ray_kwargs.ray_init.num_cpus"
    return f"the cluster has {has}, the plan needs {wanted}; ask for less, {how}"


@dataclass
class ResourcePoolManager:
    """Makes the pools of a plan by name and assigns one to each role.

    `resource_pool_spec` maps a pool's name to its processes on nodes, `mapping` a role to a pool's name. A pool in
    `min_nodes` starts with that many of its nodes.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Hashable, str]
    max_colocate_count: int | None = None
    min_nodes: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    resource_pool_dict: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ConfigError(f"{role} is mapped to pool '{pool}'; the plan has {sorted(self.resource_pool_spec)}")

    def make_pool(self, process_on_nodes: Sequence[int], max_colocate_count: int, name: str) -> ResourcePool:
        """A pool of the kind that this manager makes."""
        return ResourcePool(process_on_nodes, max_colocate_count)

    def create_resource_pool(self) -> None:
        """Make the pools; a pool has room for as many groups as roles are mapped to it, unless a number is given."""
        for name, process_on_nodes in self.resource_pool_spec.items():
            max_groups = self.max_colocate_count or max(1, sum(pool == name for pool in self.mapping.values()))
            self.resource_pool_dict[name] = self.make_pool(process_on_nodes, max_groups, name)

    def get_resource_pool(self, role: Hashable) -> ResourcePool:
        """The pool of a role; KeyError names the roles there are."""
        if role not in self.mapping:
            raise KeyError(f"role {role} has no pool; mapped are {[str(known) for known in self.mapping]}")
        return self.resource_pool_dict[self.mapping[role]]
