"""What verl's tutorial and guides do with workers, pools and groups works with only the import path changed."""

from collections.abc import Iterator

import pytest
import ray
import torch
from rlsys.single_controller.base.decorator import Dispatch, register
from rlsys.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, merge_resource_pool

from rlsys import DataProto
from rlsys.single_controller import ClassWithInitArgs, ResourcePool, Worker
from rlsys.single_controller.ray import create_colocated_worker_cls
from tests.unit.single_controller.verl_tutorial import Adder, Counter

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def pools() -> tuple[RayResourcePool, RayResourcePool]:
    first, second = (RayResourcePool([2], use_gpu=False, name_prefix=name, num_cpus=0.5) for name in "ab")
    return first, second


def test_groups_share_pools_of_their_own_and_a_merged_one(pools: tuple[RayResourcePool, RayResourcePool]) -> None:
    counters = RayClassWithInitArgs(cls=ray.remote(Counter))
    merged = merge_resource_pool(*pools)
    assert isinstance(merged, ResourcePool)
    assert (merged.local_world_size_list, merged.local_rank_list) == ([2, 2, 2, 2], [0, 1, 0, 1])
    with RayWorkerGroup(pools[0], counters) as one, RayWorkerGroup(merged, counters) as both:
        assert one.execute_all_sync("add", x=[1, 1]) == [1.0, 2.0]
        assert both.execute_all_sync("add", x=[3] * 4) == [3.0, 4.0, 5.0, 6.0]
        assert both.add_everywhere(x=10) == [13.0, 14.0, 15.0, 16.0]
        assert (one.world_size, both.world_size) == (2, 4)
        assert ray.get(one.workers[1].add.remote(5)) == 7.0


def test_custom_dispatch_and_rank_zero(pools: tuple[RayResourcePool, RayResourcePool]) -> None:
    with RayWorkerGroup(merge_resource_pool(*pools), RayClassWithInitArgs(cls=ray.remote(Adder), x=2)) as group:
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
