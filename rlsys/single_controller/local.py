"""The local backend: the same groups with the workers in this process, so that a debugger steps into them.

Ranks run one after another. Independent data-parallel ranks work in any number; a torch process group works with one.
Batches are copied between caller and worker, as by a real process boundary. Deadlines cannot interrupt a call here.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlsys.single_controller.calls import DEFAULT_DEADLINE_S, Crew, Deadlines, Failure, Header, Pending, finish
from rlsys.single_controller.host import Recorders, answer, run_method, without_padding
from rlsys.single_controller.resource_pool import ResourcePool
from rlsys.single_controller.rows import is_rows
from rlsys.single_controller.worker import (
    NO_PROCESS_GROUP,
    RANK_VARIABLES,
    Worker,
    environment,
    free_port,
    rank_environment,
)
from rlsys.single_controller.worker_group import Backend, ClassWithInitArgs, RankCall, WorkerGroup


@dataclass(frozen=True, eq=False)
class LocalPending:
    """An answer that is there already."""

    crew: Crew
    role: str
    rank: int
    stage: str
    answered: tuple[Header, Any]
    upstream: list[Pending] = field(default_factory=list)

    def header(self) -> Header:
        return self.answered[0]

    def value(self) -> Any:
        return self.answered[1]

    def references(self) -> tuple[Any, Any]:
        return self.answered


class LocalWorkerGroup(WorkerGroup):
    """A worker group without processes; takes what RayWorkerGroup takes, as far as it has a meaning here."""

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        cls_with_init: ClassWithInitArgs | None = None,
        *,
        role: str | None = None,
        deadlines: Deadlines = DEFAULT_DEADLINE_S,
        worker_env: Mapping[str, str] | None = None,
    ) -> None:
        if cls_with_init is None:
            raise ValueError("LocalWorkerGroup needs a ClassWithInitArgs")
        world_size = 1 if resource_pool is None else resource_pool.world_size
        name = role or cls_with_init.cls.__name__
        backend = LocalBackend(cls_with_init, name, world_size, deadlines, worker_env or {})
        super().__init__(backend, cls_with_init.cls, role=name)


class LocalBackend(Backend):
    """Worker objects of this process, each with the environment of its rank while its code runs."""

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs,
        role: str,
        world_size: int,
        deadlines: Deadlines,
        worker_env: Mapping[str, str],
    ) -> None:
        super().__init__(world_size, deadlines)
        self._cls_with_init, self._role = cls_with_init, role
        master = ("127.0.0.1", free_port()) if world_size == 1 else None
        self._environments = [
            {
                **rank_environment(rank=rank, world_size=world_size, local_rank=0, local_world_size=1, master=master),
                **worker_env,
            }
            for rank in range(world_size)
        ]
        self._workers: list[Any] = [None] * world_size
        self._recorders = Recorders()
        for rank in range(world_size):
            self._build(rank)

    @property
    def workers(self) -> list[Any]:
        return list(self._workers)

    def submit(self, role: str, stage: str, calls: Sequence[RankCall]) -> list[Pending]:
        return [
            self._pending(role, stage, call.rank, partial(self._recorded, call), list(call.upstream)) for call in calls
        ]

    def wait_done(self, pending: Sequence[Pending], timeout_s: float) -> list[Pending]:
        return list(pending)

    def probe(self, rank: int) -> Pending:
        return LocalPending(self, self._role, rank, "probe", (Header(), None))

    def host(self, rank: int) -> str:
        return f"{socket.gethostname()} (this process)"

    def log_tail(self, rank: int) -> str:
        return ""

    def diagnose(self, rank: int) -> str:
        return f"pid {os.getpid()} is this process"

    def restart(self, rank: int, deadline_s: float | None) -> None:
        self._build(rank)

    def close(self) -> None:
        for worker in self._workers:
            if isinstance(worker, Worker):
                worker.close()
        self._workers = [None] * self.world_size

    def _build(self, rank: int) -> None:
        made = self._cls_with_init

        def build() -> None:
            self._workers[rank] = made.cls(*made.args, **made.kwargs)

        finish([self._pending(self._role, "start", rank, lambda: answer(build), [])])

    def _pending(self, role: str, stage: str, rank: int, run: Any, upstream: list[Pending]) -> Pending:
        with environment(self._environments[rank], unset=RANK_VARIABLES):
            header, value = run()
        return LocalPending(self, role, rank, stage, (self._explained(header), value), upstream)

    def _explained(self, header: Header) -> Header:
        """Say why a rank that looks for a process group finds none."""
        failure = header.failure
        if self.world_size == 1 or failure is None or not _wants_process_group(failure):
            return header
        return replace(header, failure=replace(failure, cause=f"{failure.cause} ({NO_PROCESS_GROUP})"))

    def _recorded(self, call: RankCall) -> tuple[Header, Any]:
        worker = f"{call.spec.role} {call.rank}"
        return self._recorders.answer(worker, call.spec.method, lambda: self._run(call))

    def _run(self, call: RankCall) -> Any:
        host = self._workers[call.rank]
        worker = host if call.spec.target is None or host is None else host.role(call.spec.target)
        if worker is None:
            raise RuntimeError("the group was closed")
        values = [_own(value) for value in call.values]
        result, num_padding = run_method(worker, call.spec, values, _fetch)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return _own(without_padding(result, num_padding, call.spec.method))


def _wants_process_group(failure: Failure) -> bool:
    return "MASTER_ADDR" in failure.cause or "MASTER_PORT" in failure.cause


def _own(value: Any) -> Any:
    """A copy of a batch, so that caller and worker never write into each other's tensors."""
    return copy.deepcopy(value) if is_rows(value) else value


def _fetch(references: list[Any]) -> list[Any]:
    return [_own(reference) for reference in references]
