"""Weights for external servers: files that the actor exports and the servers load, or broadcasts to each server."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rlsys.fleet.external.engine import RemoteEngine
from rlsys.fleet.external.http import RefusedError, ServerFault
from rlsys.fleet.external.server import ServerReplica
from rlsys.types import TransferReport, WeightUpdateMeta
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.executors.base import RankFuture, WeightGroup, wait_all
from rlsys.weights.executors.external import BroadcastSpec, ServerGroup

ADAPTER_DIR = "lora_adapter"


class ExportsModel(WeightGroup, Protocol):
    """The actor's worker group, as much of it as a transfer needs."""

    def export(self, path: str, what: Literal["export", "adapter"] = "export") -> object: ...


class ServerTransfer:
    """A WeightTransfer to external servers."""

    version: int | None = None

    def validate(self) -> None:
        raise WeightTransferError("external servers expose no tensors to compare; set rollout.validate_weight=false")


@dataclass
class ExternalTransfer(ServerTransfer):
    """Exports the actor's weights into `folder`/v<version> and has the servers load them; keeps the last two versions.

    With `lora_name` the servers load only the adapter, under that name.
    """

    actor: ExportsModel
    engine: RemoteEngine
    folder: Path
    lora_name: str
    deadline_s: float

    def push(self, version: int) -> TransferReport:
        """Bring all servers to the actor's weights; WeightTransferError when none of them loaded them."""
        started_s = time.monotonic()
        path = self.folder / f"v{version}"
        self.actor.export(str(path), "adapter" if self.lora_name else "export")
        source = path / ADAPTER_DIR if self.lora_name else path
        meta = WeightUpdateMeta(version, weights_path=str(source), metadata={"lora_name": self.lora_name})
        self.engine.load_weights(meta, self.deadline_s)
        self._delete_old(path)
        self.version = version
        num_bytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        return TransferReport(version, num_bytes, time.monotonic() - started_s, "", "disk")

    def _delete_old(self, newest: Path) -> None:
        """Delete all versions but the last two, from which a server that comes back may still load."""
        others = [path for path in self.folder.glob("v*") if path != newest and path.is_dir()]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in others[:-1]:
            shutil.rmtree(path, ignore_errors=True)


class BroadcastTransfer(ServerTransfer):
    """Sends the actor's weights to the servers over a process group with each: NCCL between GPUs, gloo between CPUs.

    A server that fails is out until the next push; a push forms new groups after any failure.
    """

    def __init__(self, actor: ExportsModel, engine: RemoteEngine, *, bucket_bytes: int, deadline_s: float) -> None:
        self.actor, self.engine, self.bucket_bytes, self.deadline_s = actor, engine, bucket_bytes, deadline_s
        self._groups: Mapping[str, ServerGroup] = {}
        self._is_whole, self._num_bytes = False, 0

    def push(self, version: int) -> TransferReport:
        """Bring all servers to the actor's weights; WeightTransferError when none of them received them."""
        started_s = time.monotonic()
        self.engine.load_weights(WeightUpdateMeta(version, weights_path=""), self.deadline_s, self._send)
        self.version = version
        return TransferReport(version, self._num_bytes, time.monotonic() - started_s, "", "nccl")

    async def _send(self, servers: Sequence[ServerReplica], version: int) -> Sequence[ServerReplica]:
        """Send a version to these servers; returns those that have received all of it."""
        stage = f"update_weights to version {version}"
        reached = {server.url: server for server in servers}
        is_whole, self._is_whole, self._num_bytes = self._is_whole, False, 0
        lost: tuple[str, ...] = ()
        if not is_whole or reached.keys() != self._groups.keys():
            lost = await self._join(reached)
        lost += await _each(reached, lambda server: _begin(server, stage))
        await self._trainer("send_weights", version)
        while bucket := (await self._trainer("weight_step", "bucket", lost))[0]:
            for url, cause in bucket.lost.items():
                reached.pop(url).give_up(f"{url} at stage '{stage}': {cause}")
            self._num_bytes += bucket.num_bytes
            calls = {url: self.engine.backend.receive(bucket, self._groups[url]) for url in reached}
            lost = await _each(reached, lambda server: server.send(stage, calls[server.url]))  # noqa: B023
        await _each(reached, lambda server: server.send(stage, *self.engine.backend.end_update(str(version))))
        self._is_whole = len(reached) == len(servers)
        return [*reached.values()]

    async def _join(self, servers: dict[str, ServerReplica]) -> tuple[str, ...]:
        """Form a group with each server, after leaving an earlier one; drops and returns those that did not join."""
        backend, ranks = self.engine.backend, dict[str, int]()

        async def leave(server: ServerReplica) -> None:
            if group := self._groups.get(server.url):
                await server.send("leave", backend.leave_group(group))
            ranks[server.url] = await server.num_ranks()

        await _each(servers, leave)
        trainers = range(self.actor.world_size)
        specs = [BroadcastSpec(ranks, self.bucket_bytes, self.deadline_s, rank) for rank in trainers]
        opened = [self.actor.execute_rank_async(spec.rank, "open_weight_transfer", spec) for spec in specs]
        self._groups = groups = (await self._results(opened))[0]
        await self._trainer("weight_step", "join")
        return await _each(servers, lambda server: server.send("join", backend.join_group(groups[server.url])))

    async def _trainer(self, method: str, *args: object) -> list[Any]:
        """The results of all trainer ranks."""
        return await self._results(self.actor.execute_all_async(method, *args))

    async def _results(self, futures: Sequence[RankFuture]) -> list[Any]:
        return await asyncio.to_thread(wait_all, futures, lambda: self.deadline_s)


async def _begin(server: ServerReplica, stage: str) -> None:
    """Begin an update, after ending one that was cut off."""
    backend = server.engine.backend
    try:
        await server.send(stage, backend.begin_update)
    except (ServerFault, RefusedError):
        await server.send(stage, *backend.end_update(""), backend.begin_update)


async def _each(servers: dict[str, ServerReplica], act: Callable[[ServerReplica], Awaitable[None]]) -> tuple[str, ...]:
    """Act for all servers at once; drops and returns those for which it failed."""
    succeeded = await asyncio.gather(*(server.attempt(act(server)) for server in servers.values()))
    lost = tuple(url for url, done in zip(servers, succeeded, strict=True) if not done)
    for url in lost:
        del servers[url]
    return lost
