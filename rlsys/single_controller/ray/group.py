"""RayWorkerGroup: what a driver makes of a class, its arguments and a pool."""

from collections.abc import Mapping, Sequence
from typing import Any, Self
from uuid import uuid4

import ray

from rlsys.single_controller.calls import DEFAULT_DEADLINE_S, Deadlines
from rlsys.single_controller.ray.backend import RayBackend
from rlsys.single_controller.ray.cluster import NAMESPACE
from rlsys.single_controller.ray.pool import RayResourcePool
from rlsys.single_controller.worker_group import ClassWithInitArgs, WorkerGroup


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class (plain or wrapped by ray.remote), its arguments, and further options for its actors."""

    def __init__(self, cls: Any, *args: object, **kwargs: object) -> None:
        if isinstance(cls, ray.actor.ActorClass):
            cls = getattr(cls, "__ray_metadata__").modified_class.__ray_actor_class__  # noqa: B009
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, object] = {}


class RayWorkerGroup(WorkerGroup):
    """A worker group of Ray actors on a pool, one per slot, or over actors that run already (`worker_handles`)."""

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[object] | None = None,
        *,
        role: str | None = None,
        deadlines: Deadlines = DEFAULT_DEADLINE_S,
        worker_env: Mapping[str, str] | None = None,
    ) -> None:
        if ray_cls_with_init is None:
            raise ValueError("RayWorkerGroup needs a RayClassWithInitArgs")
        role = role or name_prefix or ray_cls_with_init.cls.__name__
        backend = RayBackend(ray_cls_with_init, role, deadlines, worker_env or {})
        if worker_handles is None and worker_names is not None:
            worker_handles = [ray.get_actor(name, namespace=NAMESPACE) for name in worker_names]
        if worker_handles is not None:
            backend.attach(worker_handles, worker_names or ())
        elif resource_pool is not None:
            prefix = f"{name_prefix or uuid4().hex[:6]}_{ray_cls_with_init.cls.__name__}_"
            backend.start(resource_pool, bin_pack, prefix, detached)
        else:
            raise ValueError("RayWorkerGroup needs a resource pool, worker_names or worker_handles")
        try:
            super().__init__(backend, ray_cls_with_init.cls, role=role)
        except ValueError:
            backend.close()
            raise
        self.worker_names = backend.names

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[object] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        *,
        deadlines: Deadlines = DEFAULT_DEADLINE_S,
    ) -> Self:
        """A group over detached actors of an earlier driver, by the `worker_names` it had."""
        where = {"name_prefix": name_prefix, "worker_names": worker_names, "worker_handles": worker_handles}
        return cls(None, ray_cls_with_init, deadlines=deadlines, **where)
