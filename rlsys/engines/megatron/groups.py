"""Megatron's process groups: made once for each set of parallel sizes, and made current for one engine at a time.

Megatron keeps its groups in globals of a module. Engines of different sizes in one process each put their own there
for as long as one of their methods runs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlsys.models.megatron import shim

# isort: split

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rlsys.engines.mesh import EngineRanks, ensure_process_group, own_device
from rlsys.models.megatron.parallel import ParallelSizes, RankPlace

_made: dict[tuple[object, ParallelSizes], dict[str, object]] = {}
_EMPTY = {name: value for name, value in vars(mpu).items() if name.startswith("_") and name.upper() == name}


@dataclass(frozen=True)
class MegatronRanks(EngineRanks):
    """The place of a rank of MegatronEngine; `expert_dp_rank` counts the copies of its experts, `copy_rank` those of
    its other parameters."""

    place: RankPlace
    copy_rank: int
    expert_dp_rank: int


def make_ranks(device: str, sizes: ParallelSizes) -> MegatronRanks:
    """The groups of an engine over all ranks of the default process group.

    Where tensors are cut, exchanges start before the products that hide them, unless the environment has
    CUDA_DEVICE_MAX_CONNECTIONS or CUDA has already started.
    """
    if sizes.tp > 1 and device.startswith("cuda"):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    ensure_process_group(device)
    own = own_device(device)
    with current(sizes):
        now: Any = mpu
        place = RankPlace(
            sizes,
            tp_rank=now.get_tensor_model_parallel_rank(),
            pp_rank=now.get_pipeline_model_parallel_rank(),
            ep_rank=now.get_expert_model_parallel_rank(),
            etp_rank=now.get_expert_tensor_parallel_rank(),
        )
        first = place.tp_rank == now.get_context_parallel_rank() == 0
        return MegatronRanks(
            device=own,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            dp_rank=now.get_data_parallel_rank(),
            dp_size=now.get_data_parallel_world_size(),
            is_collect=first and place.pp_rank == 0,
            reports_loss=first and place.is_last_stage,
            loss_group=None,
            place=place,
            copy_rank=now.get_data_parallel_rank(with_context_parallel=True),
            expert_dp_rank=now.get_expert_data_parallel_rank(),
        )


@contextmanager
def current(sizes: ParallelSizes) -> Iterator[None]:
    """Megatron's groups are those of `sizes` within the block; the first time for these sizes it is collective."""
    before = _globals()
    key = (dist.group.WORLD, sizes)
    try:
        if key not in _made:
            vars(mpu).update(_EMPTY)
            mpu.initialize_model_parallel(**sizes.arguments(), create_gloo_process_groups=False)
            with torch.random.fork_rng(devices=[] if shim.ON_CPU else [torch.cuda.current_device()]):
                model_parallel_cuda_manual_seed(1)
            _made[key] = _globals()
        vars(mpu).update(_made[key])
        yield
    finally:
        vars(mpu).update(before)


def _globals() -> dict[str, object]:
    return {name: vars(mpu)[name] for name in _EMPTY}
