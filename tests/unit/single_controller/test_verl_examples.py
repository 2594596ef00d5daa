"""What verl's tutorial and guides do with workers, pools and groups works with only the import path changed."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from rlsys.single_controller.base.decorator import Dispatch, Execute, collect_all_to_all, register
from rlsys.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, merge_resource_pool

from rlsys import DataProto
from rlsys.single_controller import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
from rlsys.single_controller.ray import create_colocated_worker_cls

pytestmark = pytest.mark.usefixtures("ray_cluster")


@ray.remote
class Counter(Worker):
    """Starts at its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.zeros(1) + self.rank

    def add(self, x: float) -> torch.Tensor:
        self.value += x
        return self.value

    @register(Dispatch.ONE_TO_ALL)
    def add_everywhere(self, x: float) -> float:
        return float(self.add(x))


def spread_two_values(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A custom dispatch function: of two values each second rank gets the same."""
    for values in (*args, *kwargs.values()):
        assert len(values) == 2
        values.extend(values[i % 2] for i in range(worker_group.world_size - 2))
    return args, kwargs


@ray.remote
class Adder(Worker):
    def __init__(self, x: int) -> None:
        super().__init__()
        self._x = x

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, x: int, y: int) -> int:
        return self._x + y + x

    @register(dispatch_mode={"dispatch_fn": spread_two_values, "collect_fn": collect_all_to_all})
    def in_turns(self, x: int, y: int) -> int:
        return self._x + y + x


@pytest.fixture
def pools() -> tuple[RayResourcePool, RayResourcePool]:
    first, second = (RayResourcePool([2], use_gpu=False, name_prefix=name, num_cpus=0.5) for name in "ab")
    return first, second


def test_groups_share_pools_of_their_own_and_a_merged_one(pools: tuple[RayResourcePool, RayResourcePool]) -> None:
    counters = RayClassWithInitArgs(cls=Counter)
    merged = merge_resource_pool(*pools)
    assert isinstance(merged, ResourcePool)
    assert (merged.local_world_size_list, merged.local_rank_list) == ([2, 2, 2, 2], [0, 1, 0, 1])
    with RayWorkerGroup(pools[0], counters) as one, RayWorkerGroup(merged, counters) as both:
        assert one.execute_all_sync("add", x=[1, 1]) == [torch.tensor([1.0]), torch.tensor([2.0])]
        assert both.execute_all_sync("add", x=[3] * 4) == [torch.tensor([3.0 + rank]) for rank in range(4)]
        assert both.add_everywhere(x=10) == [13.0, 14.0, 15.0, 16.0]
        assert (one.world_size, both.world_size) == (2, 4)
        assert ray.get(one.workers[1].add.remote(5)) == torch.tensor([7.0])


def test_custom_dispatch_and_rank_zero(pools: tuple[RayResourcePool, RayResourcePool]) -> None:
    with RayWorkerGroup(merge_resource_pool(*pools), RayClassWithInitArgs(cls=Adder, x=2)) as group:
        assert group.in_turns(x=[1, 2], y=[5, 6]) == [8, 10, 8, 10]
        assert group.on_rank_zero(x=1, y=2) == 5


class PolicyWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, scale: float) -> None:
        self.scale = scale

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        prompts.batch["prompts"] += 0  # a worker may write to what it received
        return prompts.union(DataProto.from_dict({"responses": prompts.batch["prompts"] * self.scale}))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": -data.batch["responses"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> dict[str, float]:
        return {"actor/pg_loss": float(data.batch["advantages"].sum())}


class ValueWorker(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": data.batch["prompts"] + self.rank * 0})


@pytest.fixture
def roles() -> Iterator[dict[str, RayWorkerGroup]]:
    classes: dict[str, ClassWithInitArgs] = {
        "actor_rollout": RayClassWithInitArgs(cls=PolicyWorker),
        "critic": RayClassWithInitArgs(cls=ray.remote(ValueWorker)),
    }
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1)
    with RayWorkerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=classes)) as group:
        yield group.spawn(prefix_set=classes.keys())


def test_the_loop_of_ppo_over_colocated_roles(roles: dict[str, RayWorkerGroup]) -> None:
    actor, critic = roles["actor_rollout"], roles["critic"]
    actor.init_model(2.0)
    batch = DataProto.from_dict({"prompts": torch.arange(3.0)}, meta_info={"temperature": 1.0})
    output = actor.generate_sequences(batch)
    old_log_probs, values = actor.compute_log_prob(output), critic.compute_values(output)
    output = output.union(old_log_probs.get()).union(values)
    output.batch["advantages"] = output.batch["responses"] - output.batch["values"]
    assert output.batch["old_log_probs"].tolist() == [0.0, -2.0, -4.0]
    assert output.meta_info["temperature"] == 1.0
    assert actor.update_actor(output.select_idxs([1, 2])) == [{"actor/pg_loss": 1.0}, {"actor/pg_loss": 2.0}]
