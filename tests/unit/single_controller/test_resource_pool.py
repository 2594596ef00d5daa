"""The arithmetic of pools: slots, ranks on nodes, split, merge, and whether a cluster has room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.single_controller.resource_pool import (
    NodeCapacity,
    PoolNeed,
    ResourcePool,
    ResourcePoolManager,
    check_capacity,
    merge_resource_pool,
    split_resource_pool,
)
from rlsys.utils.errors import ConfigError

counts = st.lists(st.integers(1, 8), min_size=1, max_size=6)


def test_ranks_count_along_the_nodes() -> None:
    pool = ResourcePool([2, 3])
    assert pool.world_size == 5
    assert pool.store == [2, 3]
    assert [(slot.node, slot.index) for slot in pool.slots] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_split_pool_keeps_its_nodes_apart() -> None:
    first, second = split_resource_pool(ResourcePool([4, 4]), [6, 2])
    assert (first.store, second.store) == ([4, 2], [2])
    assert second.slots[0].index == 2


@pytest.mark.parametrize("size", [0, -8, 3, 9, [4, 3], [9, -1], []])
def test_a_split_that_does_not_add_up_is_refused(size: int | list[int]) -> None:
    with pytest.raises(ConfigError, match="cannot be split"):
        split_resource_pool(ResourcePool([4, 4]), size)


@given(counts, st.data())
def test_split_and_merge_lose_no_slot(process_on_nodes: list[int], data: st.DataObject) -> None:
    pool = ResourcePool(process_on_nodes)
    sizes, left = [], pool.world_size
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    merged, *others = split_resource_pool(pool, sizes)
    for other in others:
        merged = merge_resource_pool(merged, other)
    assert merged.slots == pool.slots
    assert merged.store == pool.store


def test_pools_of_different_kinds_do_not_merge() -> None:
    with pytest.raises(ConfigError, match="one kind"):
        merge_resource_pool(ResourcePool([1], max_colocate_count=1), ResourcePool([1], max_colocate_count=2))


def test_two_pools_of_one_node_each_stay_two_nodes_when_merged() -> None:
    merged = merge_resource_pool(ResourcePool([2]), ResourcePool([2]))
    assert merged.store == [2, 2]


@pytest.mark.parametrize(("arguments", "message"), [(([0],), "at least one process"), (([1], 0), "max_colocate_count")])
def test_senseless_pools_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ResourcePool(*arguments)  # type: ignore[arg-type]


def test_capacity_counts_whole_nodes() -> None:
    nodes = [NodeCapacity(32, 8), NodeCapacity(32, 8)]
    check_capacity([PoolNeed("a", (8,), 1, 1), PoolNeed("b", (4, 4), 1, 1)], nodes)
    check_capacity([PoolNeed("small", (2,), 1, 1), PoolNeed("large", (8, 6), 1, 1)], nodes)
    with pytest.raises(ConfigError, match=r"64 CPUs and 16 GPUs on 2 node\(s\) \(at most 32 and 8 on one\).*12 CPUs"):
        check_capacity([PoolNeed("wide", (12,), 1, 1)], nodes)
    with pytest.raises(ConfigError, match="pool 'b'"):
        check_capacity([PoolNeed("a", (8, 8), 1, 1), PoolNeed("b", (1,), 1, 1)], nodes)
    check_capacity([PoolNeed("fractions", (4,), 0.5, 0)], [NodeCapacity(2, 0)])
    with pytest.raises(ConfigError, match="no node has room for 3"):  # Ray gives the 4 the node of 6, as here
        check_capacity(
            [PoolNeed("a", (3, 3), 1, 1), PoolNeed("b", (4,), 1, 1)], [NodeCapacity(32, 6), NodeCapacity(32, 4)]
        )


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ({"train": (8,) * 4}, "(trainer.nnodes=4 trainer.n_gpus_per_node=8)"),
        ({"train": (16,)}, "(trainer.nnodes=1 trainer.n_gpus_per_node=16)"),
        (
            {"train": (8, 8), "rollout": (1,) * 4},
            "(trainer.nnodes=2 trainer.n_gpus_per_node=8; 4 of trainer.rollout_workers: 4 x 1 on one node)",
        ),
        ({"rollout": (8, 2, 8, 2)}, "(20 of trainer.rollout_workers: 2 x 8 on one node, 2 x 2 on one node)"),
        ({"rollout": (8, 8), "teacher": (4,)}, "distillation.nnodes=1 distillation.n_gpus_per_node=4"),
    ],
)
def test_a_refused_plan_names_the_keys_and_both_counts(needs: dict[str, tuple[int, ...]], says: str) -> None:
    nodes = [NodeCapacity(32, 8), NodeCapacity(32, 8)]
    with pytest.raises(ConfigError) as refused:
        check_capacity([PoolNeed(name, counts, 1, 1) for name, counts in needs.items()], nodes)
    assert says in str(refused.value)
    assert "the cluster has 64 CPUs and 16 GPUs on 2 node(s) (at most 32 and 8 on one), the plan" in str(refused.value)


@pytest.mark.parametrize(
    ("needs", "cpus", "says"),
    [
        (
            {"train": (8,), "rollout": (4,)},
            1,
            "for 4 process(es) of pool 'rollout' with 4 CPUs and 4 GPUs: left are 24 CPUs and 0 GPUs on 1 node(s), "
            "32 CPUs and 2 GPUs on 2 node(s)",
        ),
        (
            {"train": (2, 2), "rollout": (8, 1)},
            6.5,
            "for 8 process(es) of pool 'rollout' with 52 CPUs and 8 GPUs: left are 32 CPUs and 8 GPUs on 1 node(s), "
            "32 CPUs and 2 GPUs on 2 node(s)",
        ),
    ],
)
def test_a_refused_plan_says_what_the_nodes_have_left(
    needs: dict[str, tuple[int, ...]], cpus: float, says: str
) -> None:
    nodes = [NodeCapacity(32, 8), NodeCapacity(32, 2), NodeCapacity(32, 2)]
    with pytest.raises(ConfigError) as refused:
        check_capacity([PoolNeed(name, counts, cpus, 1) for name, counts in needs.items()], nodes)
    assert str(refused.value).startswith(f"no node has room {says}; the cluster has 96 CPUs and 12 GPUs on 3 node(s)")


def test_the_manager_gives_roles_their_pools() -> None:
    mapping = {"actor": "train", "critic": "train", "rollout": "serve"}
    manager = ResourcePoolManager({"train": [4], "serve": [2, 2]}, mapping)
    manager.create_resource_pool()
    pools = manager.resource_pool_dict
    assert {name: (pool.store, pool.max_colocate_count) for name, pool in pools.items()} == {
        "train": ([4], 2),
        "serve": ([2, 2], 1),
    }
    assert manager.get_resource_pool("actor") is manager.get_resource_pool("critic")
    with pytest.raises(KeyError, match="judge"):
        manager.get_resource_pool("judge")
    with pytest.raises(ConfigError, match=r"pool 'missing'.*\['train'\]"):
        ResourcePoolManager({"train": [4]}, {"actor": "missing"})
