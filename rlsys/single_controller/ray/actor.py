"""The actor around one worker, and the answers that come from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import exceptions as ray_exceptions

from rlsys.single_controller import diagnosis
from rlsys.single_controller.calls import Crew, Failure, Header, Pending
from rlsys.single_controller.diagnosis import ProcessInfo
from rlsys.single_controller.host import WorkerHost
from rlsys.single_controller.worker import free_port
from rlsys.utils.errors import FailedWorker, WorkerError


class RayHost(WorkerHost):
    """The actor around a worker."""

    def __init__(self) -> None:
        super().__init__(ray.get)
        diagnosis.dump_stacks_on_signal()

    def describe(self) -> tuple[Header, tuple[ProcessInfo, str, int]]:
        """Where this process runs: itself, its node, and a free port there."""
        address, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return Header(), (diagnosis.here(address), node_id, free_port(address))


def host_class(cls: type) -> Any:
    """An actor class named after the worker's, whose handles also have the worker's public methods."""

    def forward(name: str) -> Callable[..., Any]:
        return lambda host, *args, **kwargs: getattr(host._worker, name)(*args, **kwargs)

    public = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    methods = {name: forward(name) for name in public if not hasattr(RayHost, name)}
    return ray.remote(type(cls.__name__, (RayHost,), {**methods, "__module__": __name__}))


@dataclass(frozen=True, eq=False)
class RayPending:
    """An answer on its way from an actor."""

    crew: Crew
    role: str
    rank: int
    stage: str
    refs: tuple[Any, Any]
    upstream: list[Pending] = field(default_factory=list)

    def header(self) -> Header:
        try:
            return ray.get(self.refs[0])
        except ray_exceptions.RayActorError as error:
            return Header(Failure(_death(error), died=True))
        except ray_exceptions.RayError as error:
            return Header(Failure(str(error)))

    def value(self) -> Any:
        """The result; WorkerError when it was lost after the worker had answered, with its node."""
        try:
            return ray.get(self.refs[1])
        except ray_exceptions.RayError as error:
            host = self.crew.host(self.rank)
            raise WorkerError(
                FailedWorker(self.role, self.rank, host, self.stage, f"its answer was lost: {error}")
            ) from error

    def references(self) -> tuple[Any, Any]:
        return self.refs


def _death(error: ray_exceptions.RayActorError) -> str:
    """Ray's report of a death without its standing advice."""
    text = str(error)
    start = max(text.find("The actor is dead because"), 0)
    return "the worker process died: " + text[start:].split(" Some common causes")[0]
