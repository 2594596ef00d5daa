"""What lets a vLLM server take full weights from a job on another host: scripts/run_vllm_base.sh names it.

The server needs this package on its path, and nothing of it but torch and what is here.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from rlsys.ipc.process_group import ProcessGroup, Rendezvous, address_towards, server_token
from rlsys.rollout.vllm.packed_weights import pack_again

TIMEOUT_S = 600.0
Scope = MutableMapping[str, Any]
ASGIApp = Callable[[Scope, object, object], Awaitable[None]]


@dataclass
class ServerGroupInfo(WeightTransferInitInfo):
    """The process group that the trainer, its rank 0, has opened."""

    address: str
    name: str
    backend: str
    world_size: int


class ProcessGroupTransferEngine(NCCLWeightTransferEngine):
    """vLLM's weight transfer over torch's process groups: gloo for servers on CPUs, groups that can be aborted."""

    init_info_cls = ServerGroupInfo
    group: ProcessGroup | None = None

    def init_transfer_engine(self, init_info: ServerGroupInfo) -> None:
        self.shutdown()
        parallel, host = self.parallel_config, init_info.address.rpartition(":")[0]
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        token, here = server_token(init_info.name, self.device.type), address_towards(host)
        self.group = ProcessGroup(Rendezvous(init_info.address, token, rank, init_info.world_size, TIMEOUT_S, here))
        self.group.join(self.device)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("the server has not joined a process group")
        with self.group.guarded("receive"):
            infos = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            tensors = {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                for name, dtype, shape in infos
            }
            for work in self.group.broadcast([*tensors.values()]):
                work.wait()
        self.model.load_weights([*tensors.items()])

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        pack_again(self.model)

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


class WeightTransferExtension:
    """Mixed into vLLM's worker class, which makes every worker process import this module."""


class RequireToken:
    """An ASGI app that asks for the API key on every route but /health, those of the development mode included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app, self.header = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Scope, receive: object, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope.get("path") == "/health" or hmac.compare_digest(given, self.header):
            return await self.app(scope, receive, send)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the token is missing or wrong"})


WeightTransferEngineFactory.register_engine("rlsys", ProcessGroupTransferEngine)
