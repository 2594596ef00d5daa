"""Seconds of a weight push through shared memory beside bare copies of the same bytes.

    python scripts/bench/weight_push.py [--shape tiny|smollm2] [--ranks 2] [--dtype float32] [--threads 1] [--repeats 5]

Trainer ranks hold uneven dim-0 shards in float32, one rollout engine the whole model in `dtype`. All sides run one
after the other in this process, so the sum is the work, not the wall-clock of parallel ranks. A push writes every byte
into the shared memory and out again, and reads each twice more for the checksums; the limit is two plain copies. Best
of the repeats.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from hf_rollout import build  # pyrefly: ignore
from peers import machine  # pyrefly: ignore
from torch import Tensor

from rlsys.rollout.hf.engine import HFRollout
from rlsys.types import Box, Shard, WeightLayout
from rlsys.weights.endpoints import WeightEndpoint, WeightReceiver, WeightSender
from rlsys.weights.sharding_manager import ShardingManager


class Shards:
    """A trainer rank that holds its rows of every tensor."""

    def __init__(self, full: dict[str, Tensor], rank: int, num_ranks: int, host: str) -> None:
        self.tensors, shards = dict[str, Tensor](), []
        for name, tensor in full.items():
            chunk = -(-tensor.shape[0] // num_ranks)
            start, stop = min(tensor.shape[0], rank * chunk), min(tensor.shape[0], (rank + 1) * chunk)
            if stop > start:
                self.tensors[name] = tensor[start:stop].clone()
                box = Box(name, (start, *[0] * (tensor.ndim - 1)), (stop - start, *tensor.shape[1:]))
                shards.append(Shard(box, name, (0,) * tensor.ndim))
        shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
        self.layout = WeightLayout(rank, host, tuple(shards), shapes, dict.fromkeys(shapes, "float32"))

    def weight_layout(self) -> WeightLayout:
        return self.layout

    def local_tensors(self) -> dict[str, Tensor]:
        return self.tensors


class InlineGroup:
    """Ranks of this process, called one after the other; `seconds` is the time of their calls since the last reset."""

    def __init__(self, endpoints: list[WeightEndpoint]) -> None:
        self.endpoints, self.seconds = endpoints, 0.0

    @property
    def world_size(self) -> int:
        return len(self.endpoints)

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> Any:
        started_s = time.perf_counter()
        result = getattr(self.endpoints[rank], method)(*args)
        self.seconds += time.perf_counter() - started_s
        return SimpleNamespace(get=lambda deadline_s=None: result)

    def execute_all_async(self, method: str, *args: Any) -> list[Any]:
        return [self.execute_rank_async(rank, method, *args) for rank in range(self.world_size)]


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copies(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    return (target.copy_(source) for target, source in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", "smollm2"], default="smollm2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kind = getattr(torch, args.dtype)
    rollout = HFRollout(build(args.shape).to(kind))
    full = {name: p.detach() for name, p in build(args.shape).named_parameters()}
    trainers: list[Any] = [Shards(full, rank, args.ranks, rollout.host) for rank in range(args.ranks)]
    source = InlineGroup([WeightSender(trainer) for trainer in trainers])
    destination = InlineGroup([WeightReceiver(rollout)])
    manager = ShardingManager(source, destination, executor="shm")
    connect_s = timed(manager.connect)
    into = {name: torch.empty_like(tensor, dtype=kind) for name, tensor in full.items()}
    engine = rollout.local_tensors()
    first = [(into[name], tensor) for name, tensor in full.items()]
    second = [(engine[name], tensor) for name, tensor in into.items()]
    best = {"write": 9e9, "read": 9e9, "push": 9e9, "two copies": 9e9}
    for version in range(args.repeats):
        best["two copies"] = min(best["two copies"], timed(lambda: list(copies(first)) + list(copies(second))))
        source.seconds = destination.seconds = 0.0
        best["push"] = min(best["push"], timed(lambda v=version: manager.push(v)))
        best["write"], best["read"] = min(best["write"], source.seconds), min(best["read"], destination.seconds)
    assert all(torch.equal(engine[name], tensor.to(kind)) for name, tensor in full.items())
    num_bytes = sum(tensor.nbytes for tensor in engine.values())
    push_s = best["push"]
    print(machine())
    print(f"{args.shape}, {args.ranks} ranks, {num_bytes / 2**20:.0f} MiB of {args.dtype}, {args.threads} thread(s)")
    print(f"  connect {connect_s * 1e3:.0f} ms once; write {best['write']:.3f} s, read {best['read']:.3f} s")
    print(f"  push {push_s:.3f} s, two copies of the same bytes {best['two copies']:.3f} s")
    print(f"  push / two copies  {push_s / best['two copies']:.2f}x")


if __name__ == "__main__":
    main()
