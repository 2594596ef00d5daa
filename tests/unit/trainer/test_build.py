"""Which processes of a run go together on a node."""

import pytest

from rlsys.config import load_config, plan_batches
from trainer.build import place_roles

TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize(("tensor", "nodes"), [(2, [2] * 16), (8, [8] * 4), (16, [8, 8, 8, 8]), (12, [8, 4, 8, 4])])
def test_a_copy_of_an_engine_is_spread_over_nodes_only_if_it_is_larger_than_one(tensor: int, nodes: list[int]) -> None:
    config = load_config(
        [
            "actor_rollout_ref.rollout.name=vllm",
            f"{TENSOR}={tensor}",
            "trainer.n_gpus_per_node=8",
            f"trainer.rollout_workers={sum(nodes)}",
        ]
    )
    _, pools = place_roles(config, plan_batches(config), node_size=8)
    assert pools == {"train": [8], "rollout": nodes}
