"""Worker groups as Ray actors on placement groups; the only package that imports ray."""

import sys

from rlsys.single_controller.colocate import create_colocated_worker_cls
from rlsys.single_controller.ray.cluster import cluster_nodes, connect, node_size
from rlsys.single_controller.ray.group import RayClassWithInitArgs, RayWorkerGroup
from rlsys.single_controller.ray.pool import RayResourcePool, RayResourcePoolManager
from rlsys.single_controller.resource_pool import merge_resource_pool, split_resource_pool

create_colocated_worker_cls_fused = create_colocated_worker_cls
ResourcePoolManager = RayResourcePoolManager
sys.modules[f"{__name__}.base"] = sys.modules[__name__]  # verl's import path
