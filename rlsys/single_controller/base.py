"""verl's import paths: `rlsys.single_controller.base` and `rlsys.single_controller.base.decorator`."""

import sys

from rlsys.single_controller import dispatch
from rlsys.single_controller.resource_pool import ResourcePool
from rlsys.single_controller.worker import Worker
from rlsys.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = ["ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"]

sys.modules[f"{__name__}.decorator"] = decorator = dispatch
