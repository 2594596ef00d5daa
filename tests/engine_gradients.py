"""Whole gradients of a training engine by name, divided by the global count so far."""

from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from rlsys.engines.fsdp.engine import FSDPEngine
from rlsys.engines.fsdp.optim import full_of
from rlsys.engines.fsdp.sharding import parameters_by_name


def gradients(engine: Any) -> dict[str, Tensor]:
    """Collective; the engine's own gradients stay as they are."""
    if not isinstance(engine, FSDPEngine):
        return _megatron_gradients(engine)
    named = parameters_by_name(engine.model).items()
    return {name: full_of(p.grad) / engine._count for name, p in named if p.grad is not None}


def _megatron_gradients(engine: Any) -> dict[str, Tensor]:
    held, optimizer = engine.held, engine.optimizer
    with engine._own_groups():
        buffers = optimizer.grad_buffers()
        before = [buffer.grad_data.clone() for buffer in buffers]
        optimizer._finalize()
        for buffer in buffers:
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                own = bucket.grad_data.view(size, -1)[rank].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=buffer.data_parallel_group)
        local = {name: p.main_grad for name, p in held.parameters.items() if p.requires_grad}
        names = [name for name in held.full_shapes if name not in held.untrained]
        with patch.dict(held.dtypes, dict.fromkeys(names, "float32")):
            buckets = held.full(local.__getitem__, 1 << 30, names=names)
            whole = {name: tensor / engine._count for bucket in buckets for name, tensor in bucket}
        for buffer, values in zip(buffers, before, strict=True):
            buffer.grad_data.copy_(values)
        return whole
