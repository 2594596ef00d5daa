"""Weight transfers into SGLang: the receiver runs inside its scheduler process, beside the parameters."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partialmethod
from typing import Any

import torch.distributed as dist

from rlsys.ipc.codec import allow_records
from rlsys.ipc.process_group import Rendezvous, own_address
from rlsys.ipc.rpc import Method
from rlsys.rollout.sglang.arguments import ReplicaRank
from rlsys.rollout.sglang.engine import SGLangRollout
from rlsys.rollout.sglang.scheduler_hooks import SchedulerEngine
from rlsys.single_controller.worker import free_port
from rlsys.telemetry.profiler import start_profile, stop_profile
from rlsys.types import Box, Shapes, Shard, WeightLayout
from rlsys.weights.endpoints import WeightReceiver
from rlsys.weights.executors.cuda_ipc import IpcHandle, IpcImportSpec, StorageHandle
from rlsys.weights.executors.disk import DiskSpec
from rlsys.weights.executors.gather import Bucket, GatherSpec
from rlsys.weights.executors.nccl import NcclSendSpec, NcclSpec
from rlsys.weights.plan import Copy
from rlsys.weights.rank_plan import RankPlan
from rlsys.weights.shared_memory import TensorHandle
from workers.colocated import learn_engine_layout

WEIGHTS_WAIT_S = 1800.0
"""Longer than any deadline of the controller, whose errors are clearer."""

allow_records(IpcImportSpec, IpcHandle, StorageHandle, TensorHandle, NcclSpec, Rendezvous, DiskSpec, GatherSpec)
allow_records(Bucket, RankPlan, Copy, WeightLayout, Shard, Box, NcclSendSpec)


def replica_of(rank: int, size: int, *, ranks_per_host: int) -> ReplicaRank:
    """This rank of a replica of `size` consecutive ranks of the process group.

    The first of them chooses the address of SGLang's own process groups, on the loopback if they are on one host.
    """
    if size == 1:
        return ReplicaRank(address=f"127.0.0.1:{free_port()}")
    host = own_address() if ranks_per_host % size else "127.0.0.1"
    store, key = dist.distributed_c10d._get_default_store(), f"sglang/{rank // size}"
    if rank % size == 0:
        store.set(key, f"[{host}]:{free_port(host)}" if ":" in host else f"{host}:{free_port(host)}")
    return ReplicaRank(rank % size, size, store.get(key).decode())


def weight_methods(engine: SchedulerEngine) -> Mapping[str, Method]:
    """What a RemoteReceiver calls in its scheduler process, over the engine there, and `learn` and profiles."""
    receiver = WeightReceiver(engine)
    forwarded = [name for name, value in vars(RemoteReceiver).items() if isinstance(value, partialmethod)]
    methods: dict[str, Method] = {name: getattr(receiver, name) for name in ("weight_layout", *forwarded)}

    def learn(keep: bool) -> None:
        learn_engine_layout(engine.weights, keep=keep)

    return {**methods, "learn": learn, "start_profile": start_profile, "stop_profile": stop_profile}


class RemoteReceiver(WeightReceiver):
    """A WeightReceiver that runs in the scheduler process of this rank."""

    engine: SGLangRollout

    def weight_layout(self, float8: Shapes | None = None) -> WeightLayout:
        return replace(self._awake("weight_layout"), rank=self.engine.rank, host=self.engine.host)

    def _awake(self, method: str, *args: object) -> Any:
        self.engine.check_weights_awake()
        return self._call(method, *args)

    def _call(self, method: str, *args: object) -> Any:
        return self.engine.remote.call(method, *args, deadline_s=WEIGHTS_WAIT_S)

    open_weight_transfer = partialmethod(_call, "open_weight_transfer")
    close_weight_transfer = partialmethod(_call, "close_weight_transfer")
    weight_step = partialmethod(_awake, "weight_step")
    send_weights = partialmethod(_awake, "send_weights")
    receive_weights = partialmethod(_awake, "receive_weights")
    weight_checksum = partialmethod(_awake, "weight_checksum")
