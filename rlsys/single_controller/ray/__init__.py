"""Worker groups as Ray actors on placement groups; the only package that imports ray."""

import sys

from rlsys.single_controller.colocate import create_colocated_worker_cls as create_colocated_worker_cls
from rlsys.single_controller.ray.cluster import cluster_nodes as cluster_nodes
from rlsys.single_controller.ray.cluster import connect as connect
from rlsys.single_controller.ray.cluster import node_size as node_size
from rlsys.single_controller.ray.group import RayClassWithInitArgs as RayClassWithInitArgs
from rlsys.single_controller.ray.group import RayWorkerGroup as RayWorkerGroup
from rlsys.single_controller.ray.pool import RayResourcePool as RayResourcePool
from rlsys.single_controller.ray.pool import RayResourcePoolManager
from rlsys.single_controller.resource_pool import merge_resource_pool as merge_resource_pool
from rlsys.single_controller.resource_pool import split_resource_pool as split_resource_pool

create_colocated_worker_cls_fused = create_colocated_worker_cls
ResourcePoolManager = RayResourcePoolManager
sys.modules[f"{__name__}.base"] = sys.modules[__name__]  # verl's import path
