"""The local backend: the same groups with the workers in this process, so that a debugger steps into them.

Ranks run one after another. Independent data-parallel ranks work in any number; a torch process group works with one.
Batches are copied between caller and worker, as by a real process boundary. Deadlines cannot interrupt a call here.
"""

import copy
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rlsys.single_controller.calls import DEFAULT_DEADLINE_S, Backend, Deadlines, Header, Pending, RankCall, finish
from rlsys.single_controller.host import WorkerHost
from rlsys.single_controller.resource_pool import ResourcePool
from rlsys.single_controller.rows import is_rows
from rlsys.single_controller.worker import NO_PROCESS_GROUP, RANK_VARIABLES, free_port, rank_environment
from rlsys.single_controller.worker_group import ClassWithInitArgs, WorkerGroup
from rlsys.utils.environment import environment


class LocalWorkerGroup(WorkerGroup):
    """A worker group without processes; takes those arguments of RayWorkerGroup that have a meaning here."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        *,
        role: str | None = None,
        deadlines: Deadlines = DEFAULT_DEADLINE_S,
    ) -> None:
        name = role or cls_with_init.cls.__name__
        backend = LocalBackend(cls_with_init, name, resource_pool.world_size, deadlines)
        super().__init__(backend, cls_with_init.cls, role=name)


class LocalBackend(Backend):
    """Worker objects of this process, each with the environment of its rank while its code runs.

    A worker that is alone only has it while it is built: threads that read variables meanwhile (tokenizers do) crash
    when another one changes them, and its methods need none.
    """

    def __init__(self, cls_with_init: ClassWithInitArgs, role: str, world_size: int, deadlines: Deadlines) -> None:
        super().__init__(world_size, deadlines)
        self._cls_with_init, self._role = cls_with_init, role
        master = ("127.0.0.1", free_port()) if world_size == 1 else None
        self._environments = [
            rank_environment(rank=rank, world_size=world_size, local_rank=0, local_world_size=1, master=master)
            for rank in range(world_size)
        ]
        self._hosts = [WorkerHost() for _ in range(world_size)]
        for rank in range(world_size):
            self.restart(rank, None)

    @property
    def workers(self) -> list[object]:
        return [host.worker for host in self._hosts]

    def submit(self, calls: Sequence[RankCall]) -> list[Pending]:
        pending = []
        for rank, spec, values in calls:
            run = partial(self._hosts[rank].call, spec, *map(_own, values))
            header, value = run() if self.world_size == 1 else self._in_rank(rank, run)
            pending.append(Pending(self, spec.role, rank, spec.method, (header, _own(value))))
        return pending

    def probe(self, rank: int) -> Pending:
        return Pending(self, self._role, rank, "probe", (Header(), None))

    def host(self, rank: int) -> str:
        return f"{socket.gethostname()} (this process)"

    def diagnose(self, rank: int) -> str:
        return f"pid {os.getpid()} is this process"

    def restart(self, rank: int, deadline_s: float | None) -> None:
        built = self._in_rank(rank, lambda: self._hosts[rank].build(self._cls_with_init))
        finish([Pending(self, self._role, rank, "start", built)])

    def close(self) -> None:
        for host in self._hosts:
            host.close()

    def _in_rank(self, rank: int, run: Callable[[], tuple[Header, object]]) -> tuple[Header, object]:
        """What `run` answers in the environment of a rank; a rank without a process group gets the reason."""
        with environment(self._environments[rank], unset=RANK_VARIABLES):
            header, value = run()
        failure = header.failure
        if self.world_size > 1 and failure is not None and "MASTER_" in failure.cause:
            header = replace(header, failure=replace(failure, cause=f"{failure.cause} ({NO_PROCESS_GROUP})"))
        return header, value


def _own(value: object) -> object:
    """A copy of a batch, so that caller and worker never write into each other's tensors."""
    return copy.deepcopy(value) if is_rows(value) else value
