"""What vLLM lacks for experts in several processes on CPUs, where a test wants to see the rest of it run."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def divide_experts_on_cpus() -> None:
    """Teach vLLM's kernel for CPUs which experts are here, and its groups to exchange unlike numbers of rows."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel = CPUUnquantizedExperts.apply

    def apply(self: object, **given: Any) -> None:
        if given["expert_map"] is not None:
            ids, local = given["topk_ids"], given["expert_map"][given["topk_ids"].long()]
            weights = given["topk_weights"] * (local >= 0)
            given |= {"topk_weights": weights, "topk_ids": local.clamp(min=0).to(ids.dtype)}
        kernel(self, **given)

    CPUUnquantizedExperts.apply = apply
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv


def _all_gatherv(self: Any, rows: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    if isinstance(rows, list):
        return [_all_gatherv(self, one, dim, sizes) for one in rows]
    sizes = sizes or [len(rows)] * self.world_size
    parts = rows.new_zeros(self.world_size, max(sizes), *rows.shape[1:])
    parts[self.rank_in_group, : len(rows)] = rows
    dist.all_reduce(parts, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, rows: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    total = rows.clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes or [len(rows) // self.world_size] * self.world_size)[self.rank_in_group].clone()
