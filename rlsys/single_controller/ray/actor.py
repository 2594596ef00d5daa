"""The actor around one worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import exceptions as ray_exceptions

from rlsys.single_controller import diagnosis
from rlsys.single_controller.calls import Header
from rlsys.single_controller.diagnosis import ProcessInfo
from rlsys.single_controller.host import WorkerHost
from rlsys.single_controller.worker import free_port
from rlsys.telemetry.log import setup_logging
from rlsys.utils.plugins import search_last_beside_namesakes


class RayHost(WorkerHost):
    """The actor around a worker."""

    def __init__(self) -> None:
        super().__init__()
        search_last_beside_namesakes()
        diagnosis.dump_stacks_on_signal()

    def build(self, made: tuple[type, Sequence[object], Mapping[str, object]]) -> tuple[Header, None]:
        setup_logging(role=made[0].__name__, rank=int(os.environ.get("RANK", 0)))
        return super().build(made)

    def describe(self) -> tuple[Header, tuple[ProcessInfo, str, int]]:
        """Where this process runs: itself, its node, and a free port there."""
        address, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return Header(), (diagnosis.here(address), node_id, free_port(address))


def host_class(cls: type) -> Any:
    """An actor class named after the worker's, whose handles also have the worker's public methods."""

    def forward(name: str) -> Callable[..., Any]:
        def call(host: RayHost, *args: object, **kwargs: object) -> Any:
            return getattr(host.worker, name)(*args, **kwargs)

        return call

    public = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    methods = {name: forward(name) for name in public if not hasattr(RayHost, name)}
    return ray.remote(type(cls.__name__, (RayHost,), {**methods, "__module__": __name__}))


def death_of(error: ray_exceptions.RayActorError) -> str:
    """Ray's message of an actor's death without the advice that it always appends."""
    text = str(error)
    start = max(text.find("The actor is dead because"), 0)
    return "the worker process died: " + text[start:].split(" Some common causes")[0]
