"""The names under which the parts of a worker group are known."""

from rlsys.single_controller.resource_pool import ResourcePool
from rlsys.single_controller.worker import Worker
from rlsys.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]
