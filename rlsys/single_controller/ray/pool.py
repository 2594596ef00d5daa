"""Resource pools reserved on a Ray cluster as placement groups."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from uuid import uuid4

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlsys.single_controller.ray.cluster import cluster_address, cluster_nodes
from rlsys.single_controller.resource_pool import PoolNeed, ResourcePool, ResourcePoolManager, Slot, check_capacity
from rlsys.utils.daemon_threads import in_daemon_thread
from rlsys.utils.errors import ConfigError, DeadlineError

PLACE = "place"
REMOVE_S, SOON_S = 3.0, 5.0
"""Seconds in which placement groups are removed, and after which it is logged that others hold a pool's resources."""
log = logging.getLogger(__name__)


class RayResourcePool(ResourcePool):
    """Slots reserved on a cluster, one placement group per node; several groups share a slot's CPUs and GPU evenly.

    A slot has `num_cpus` CPUs (fractions are allowed) and, with `use_gpu`, one GPU. Each of up to `max_colocate_count`
    groups gets its share of them. The reservation is made with the first group and given back with the last.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] = (),
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        num_cpus: float = 1.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu, self.detached = use_gpu, detached
        self.accelerator_type, self.num_cpus = accelerator_type, num_cpus
        self.name_prefix = name_prefix or f"pool_{uuid4().hex[:6]}"
        self.num_reserved = len(self.store)
        """The nodes that are reserved with the first group; further ones by `place_again`."""
        self._placed: dict[int, PlacementGroup] = {}
        self._users: Counter[Slot] = Counter()

    def need(self) -> PoolNeed:
        """What this pool asks of a cluster, for `check_capacity`."""
        name = self.name_prefix if self.num_reserved == len(self.store) else f"first {self.name_prefix}"
        return PoolNeed(name, tuple(self.store[: self.num_reserved]), self.num_cpus, float(self.use_gpu))

    def share(self) -> dict[str, float]:
        """The resources of one worker, rounded down so that all shares of a slot fit."""
        parts = self.max_colocate_count
        share = {"num_cpus": self.num_cpus / parts, "num_gpus": float(self.use_gpu) / parts}
        return {name: math.floor(value * 1e4) / 1e4 if value < 1 else value for name, value in share.items()}

    def get_placement_groups(self, bin_pack: bool = True, deadline_s: float = 120.0) -> list[PlacementGroup]:
        """The reservations, one per node; ConfigError if the cluster is too small, DeadlineError if others hold it."""
        origins = {id(slot.origin): _origin(slot) for slot in self.slots}
        return [placed for origin in origins.values() for placed in origin._reserve(bin_pack, deadline_s)]

    def _reserve(self, bin_pack: bool, deadline_s: float) -> list[PlacementGroup]:
        if not self._placed:
            check_capacity([self.need()], cluster_nodes())
            placed = [self._ask_for(count, bin_pack) for count in self.store[: self.num_reserved]]
            self._placed = dict(enumerate(placed))
            ready, waited_s = [one.ready() for one in placed], min(SOON_S, deadline_s)
            if ray.wait(ready, num_returns=len(ready), timeout=waited_s)[1]:
                who = f"the cluster at {cluster_address()}"
                log.info("waiting for a place on %s: %s", who, self._shortage())
                if ray.wait(ready, num_returns=len(ready), timeout=deadline_s - waited_s)[1]:
                    self._remove()
                    raise DeadlineError(who, PLACE, deadline_s, self._shortage())
            if len(set(self.store)) == 1:  # in the order of the nodes' addresses, whatever Ray's is
                addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
                placed.sort(key=lambda one: addresses[placement_group_table(one)["bundles_to_node_id"][0]])
                self._placed = dict(enumerate(placed))
        return [*self._placed.values()]

    def _shortage(self) -> str:
        """What it needs, and what is free now."""
        need, free = self.need(), ray.available_resources()
        each = f"{need.cpus_per_process:g} CPUs and {need.gpus_per_process:g} GPUs for each process"
        return f"needed are {need}, {each}; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs in all"

    def _ask_for(self, count: int, bin_pack: bool = True) -> PlacementGroup:
        bundle = {"CPU": self.num_cpus, "GPU": 1.0} if self.use_gpu else {"CPU": self.num_cpus}
        if self.accelerator_type:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 1e-4
        strategy, lifetime = "STRICT_PACK" if bin_pack else "PACK", "detached" if self.detached else None
        return placement_group([bundle] * count, strategy, f"{self.name_prefix}_{uuid4().hex[:6]}", lifetime)

    def place_again(self, slot: int) -> PlacementGroup:
        """Ask for another place for a slot that is alone on its node; Ray gives one when there is a node with room."""
        if slot in self._placed:
            remove_placement_group(self._placed[slot])
        self._placed[slot] = self._ask_for(1)
        return self._placed[slot]

    def acquire(self, bin_pack: bool, deadline_s: float) -> list[tuple[PlacementGroup, int] | None]:
        """Count one more group on this pool and give the placement group and bundle of each slot, if it is reserved.

        ConfigError when the pool is shared by as many groups as planned, and as `get_placement_groups`.
        """
        for slot in self.slots:
            origin = _origin(slot)
            if origin._users[slot] >= self.max_colocate_count:
                why = f"is shared by {origin._users[slot]} groups already, which is its max_colocate_count"
                raise ConfigError(f"pool '{origin.name_prefix}' {why}; raise it, close a group or use another pool")
            origin._reserve(bin_pack, deadline_s)
        for slot in self.slots:
            _origin(slot)._users[slot] += 1
        placed = [_origin(slot)._placed.get(slot.node) for slot in self.slots]
        return [None if node is None else (node, slot.index) for node, slot in zip(placed, self.slots, strict=True)]

    def release(self) -> None:
        """Count one group less; a reservation ends with its last group."""
        for slot in self.slots:
            origin = _origin(slot)
            origin._users -= Counter([slot])  # which leaves out those at 0
            if not origin._users:
                origin._remove()

    def _remove(self) -> None:
        # not once the caller has shut Ray down: the call would start another cluster
        placed = (group for group in self._placed.values() if ray.is_initialized())
        removed = in_daemon_thread(lambda: [*map(remove_placement_group, placed)], name="remove groups")
        self._placed = {}
        # a signal to all processes ends Ray's GCS as well, without which no call returns
        if wait([removed], REMOVE_S).done and (error := removed.exception()) is not None:
            log.warning("the reservation of %s was not given back: %r", self.name_prefix, error)


def _origin(slot: Slot) -> RayResourcePool:
    """The pool that reserved a slot."""
    assert isinstance(slot.origin, RayResourcePool)
    return slot.origin


@dataclass
class RayResourcePoolManager(ResourcePoolManager):
    """Makes the Ray pools of a plan, after checking that the cluster has room for all of them together."""

    use_gpu: bool = field(default=True, kw_only=True)
    num_cpus: float = field(default=1.0, kw_only=True)

    def make_pool(self, process_on_nodes: Sequence[int], max_colocate_count: int, name: str) -> RayResourcePool:
        return RayResourcePool(process_on_nodes, self.use_gpu, name, max_colocate_count, num_cpus=self.num_cpus)

    def create_resource_pool(self) -> None:
        super().create_resource_pool()
        for name, least in self.min_nodes.items():
            self.resource_pool_dict[name].num_reserved = least
        check_capacity([pool.need() for pool in self.resource_pool_dict.values()], cluster_nodes())
