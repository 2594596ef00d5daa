"""SGLang's data-parallel attention without its controller: the first rank of each copy serves requests of its own.

The controller would bring all answers to one worker, without their samples, and it takes a core. Instead each worker
starts SGLang as if it were alone, and its scheduler process joins the replica, whose ranks compute every step together.
"""

import time
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

REPLICA_ARGUMENTS = (
    *("tp_size", "dp_size", "ep_size", "nnodes", "node_rank", "dist_init_addr"),
    *("enable_dp_attention", "enable_dp_lm_head", "moe_a2a_backend"),
)
"""Arguments of SGLang that a worker leaves to its scheduler process."""
IDLE_S = 0.002
"""How long idle ranks sleep. The others wait for one that sleeps longer, as SGLang does until a request of its own."""


def scheduler_place(arguments: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """Of SGLang's arguments to a scheduler process (`names`, which depend on the version) those that place it."""
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**arguments)
    rank, size = server_args.node_rank, server_args.tp_size
    place = {
        "server_args": server_args,
        "tp_rank": rank,
        "dp_rank": rank * server_args.dp_size // size,
        "moe_ep_rank": rank * server_args.ep_size // size,
    }
    return {name: value for name, value in place.items() if name in names}


def serve_each_copy() -> None:
    """Have each copy of the attention abort its own requests, and all ranks clear their caches or none.

    SGLang takes aborts from the first rank alone. It takes a pause from there too, at the same step on every rank.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    split, flush = SchedulerRequestReceiver._split_work_and_control_reqs, Scheduler.flush_cache

    def split_requests(self: object, requests: list[object]) -> tuple[list[object], list[object]]:
        control = [request for request in split(self, requests)[1] if not isinstance(request, AbortReq)]
        of_replica = set(map(id, control))
        return [request for request in requests if id(request) not in of_replica], control

    def flush_cache(self: Scheduler, *args: object, **kwargs: object) -> bool:
        is_idle = torch.tensor(int(self.is_fully_idle()))
        dist.all_reduce(is_idle, dist.ReduceOp.MIN, get_tp_group().cpu_group)
        return bool(is_idle) and flush(self, *args, **kwargs)

    SchedulerRequestReceiver._split_work_and_control_reqs = split_requests
    Scheduler.flush_cache = flush_cache
    IdleSleeper.maybe_sleep = lambda self: time.sleep(IDLE_S)
