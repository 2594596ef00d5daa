"""The base class of workers, one per rank, and the environment variables that a rank starts with."""

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from random import SystemRandom
from typing import ParamSpec, Self, TypeVar

from rlsys.single_controller.dispatch import Dispatch, Execute, MeshRank, register
from rlsys.utils.errors import ConfigError

QUIET_PORTS = range(20000, 32000)
_reserved = list[socket.socket]()
"""A socket for each port that `free_port` has returned here: while it is bound to the port's name, no other process of
this host gets that port."""
P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """A rank of a group. Subclasses mark the methods that the controller may call with @register."""

    rank: int
    world_size: int
    local_rank: int
    """The index of this rank's device among the visible ones: 0 when it sees a single one."""
    local_world_size: int
    _environment: dict[str, str]
    _meshes: dict[str, MeshRank]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        worker = super().__new__(cls)
        worker._environment = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
        worker.rank = int(worker._environment.get("RANK", 0))
        worker.world_size = int(worker._environment.get("WORLD_SIZE", 1))
        worker.local_rank = int(worker._environment.get("LOCAL_RANK", 0))
        worker.local_world_size = int(worker._environment.get("LOCAL_WORLD_SIZE", 1))
        worker._meshes = {}
        return worker

    def get_master_addr_port(self) -> tuple[str, str]:
        """Where the group's process group meets; ConfigError when it cannot (local backend with several ranks)."""
        if "MASTER_ADDR" not in self._environment:
            raise ConfigError(NO_PROCESS_GROUP)
        return self._environment["MASTER_ADDR"], self._environment["MASTER_PORT"]

    def get_cuda_visible_devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Record this rank's position on a mesh; ValueError if it is recorded already."""
        if mesh_name in self._meshes:
            raise ValueError(f"mesh '{mesh_name}' is registered already as {self._meshes[mesh_name]}")
        self._meshes[mesh_name] = MeshRank(dp_rank, is_collect)

    def _query_dispatch_collect_info(self, mesh_name: str) -> MeshRank:
        if mesh_name not in self._meshes:
            who, known = type(self).__name__, ", ".join(sorted(self._meshes)) or "none"
            raise ValueError(f"{who} never called _register_dispatch_collect_info('{mesh_name}', ...); known: {known}")
        return self._meshes[mesh_name]

    def close(self) -> None:
        """Give back what does not end with the object, such as threads and engines: this process may live on."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run `func(worker, *args, **kwargs)` on every rank with its rows."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `func(*args, **kwargs)` on rank 0."""
        return func(*args, **kwargs)


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NO_PROCESS_GROUP = (
    "the local backend runs ranks one after another in one process, so several cannot form a torch process group; "
    "set trainer.n_gpus_per_node=1 and trainer.nnodes=1, or trainer.backend=ray"
)


def rank_environment(
    *, rank: int, world_size: int, local_rank: int, local_world_size: int, master: tuple[str, int] | None
) -> dict[str, str]:
    """The variables torch.distributed starts from."""
    return dict(zip(RANK_VARIABLES, map(str, (rank, world_size, local_rank, local_world_size, *(master or ())))))


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that no process listens on at this moment.

    It is used seconds later, so it is outside the range that systems assign to outgoing connections, and on Linux no
    other process of this host is given it as long as this one lives.
    """
    for port in (*SystemRandom().sample(QUIET_PORTS, 32), 0):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe, suppress(OSError):
            probe.bind((address, port))
            if port and sys.platform == "linux":
                _reserved.append(socket.socket(socket.AF_UNIX))
                _reserved[-1].bind(f"\0rlsys-port-{port}")  # a name without a file, which goes with the process
            return probe.getsockname()[1]
    raise OSError(f"no port is free on {address}")
