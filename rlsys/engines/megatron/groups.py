"""Megatron's process groups: made once for each set of parallel sizes, and made current for one engine at a time.

Megatron keeps its groups in globals of a module. Engines of different sizes in one process each put their own there
for as long as one of their methods runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlsys.models.megatron import start

# isort: split

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rlsys.engines.mesh import ensure_process_group, own_device
from rlsys.models.megatron.family import Place
from rlsys.models.megatron.options import Sizes
from rlsys.utils.errors import ConfigError

_made: dict[tuple[Any, Sizes], dict[str, Any]] = {}
_EMPTY = {name: value for name, value in vars(mpu).items() if name.startswith("_") and name.upper() == name}


@dataclass(frozen=True)
class MegatronRanks:
    """Where this rank stands. Ranks of one `dp_rank` see the same rows; `expert_dp_rank` counts the copies of its
    experts, `copy_rank` those of its other parameters."""

    device: torch.device
    rank: int
    world_size: int
    sizes: Sizes
    place: Place
    cp_rank: int
    dp_rank: int
    dp_size: int
    copy_rank: int
    expert_dp_rank: int

    @property
    def is_last_stage(self) -> bool:
        return self.place.pp_rank == self.place.pp_size - 1

    @property
    def is_collect(self) -> bool:
        """One rank of each data-parallel group: the first of its tensor, context and pipeline groups."""
        return self.place.tp_rank == self.cp_rank == self.place.pp_rank == 0

    @property
    def speaks_for_loss(self) -> bool:
        """One rank of each data-parallel group among those that compute the loss."""
        return self.is_last_stage and self.place.tp_rank == self.cp_rank == 0


def check_sizes(sizes: Sizes, world_size: int) -> None:
    """ConfigError unless the sizes make up groups of `world_size` ranks."""
    dense, sparse = sizes.tp * sizes.pp * sizes.cp, sizes.expert_tp * sizes.pp * sizes.ep
    if world_size % dense:
        raise ConfigError(f"tensor x pipeline x context parallel size = {dense} does not divide the {world_size} ranks")
    if world_size % sparse:
        raise ConfigError(f"expert tensor x expert x pipeline size = {sparse} does not divide the {world_size} ranks")
    if sizes.ep > 1 and sizes.tp > 1 and not sizes.sequence_parallel:
        raise ConfigError("expert and tensor parallelism together need sequence_parallel=true")


def make_ranks(device: str, sizes: Sizes) -> MegatronRanks:
    """The groups of an engine over all ranks of the default process group; ConfigError if the sizes do not fit."""
    ensure_process_group(device)
    check_sizes(sizes, dist.get_world_size())
    own = own_device(device)
    with current(sizes):
        now: Any = mpu
        place = Place(
            tp_rank=now.get_tensor_model_parallel_rank(),
            tp_size=sizes.tp,
            pp_rank=now.get_pipeline_model_parallel_rank(),
            pp_size=sizes.pp,
            vp_size=sizes.vp,
            ep_rank=now.get_expert_model_parallel_rank(),
            ep_size=sizes.ep,
            etp_rank=now.get_expert_tensor_parallel_rank(),
            etp_size=sizes.expert_tp,
            first_layers=sizes.first_layers,
            last_layers=sizes.last_layers,
        )
        return MegatronRanks(
            device=own,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            sizes=sizes,
            place=place,
            cp_rank=now.get_context_parallel_rank(),
            dp_rank=now.get_data_parallel_rank(),
            dp_size=now.get_data_parallel_world_size(),
            copy_rank=now.get_data_parallel_rank(with_context_parallel=True),
            expert_dp_rank=now.get_expert_data_parallel_rank(),
        )


@contextmanager
def current(sizes: Sizes) -> Iterator[None]:
    """Megatron's groups are those of `sizes` within the block; the first time for these sizes it is collective."""
    before = _globals()
    key = (dist.group.WORLD, sizes)
    try:
        if key not in _made:
            vars(mpu).update(_EMPTY)
            _make(sizes)
            _made[key] = _globals()
        vars(mpu).update(_made[key])
        yield
    finally:
        vars(mpu).update(before)


def _globals() -> dict[str, Any]:
    return {name: vars(mpu)[name] for name in _EMPTY}


def _make(sizes: Sizes) -> None:
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vp if sizes.vp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.expert_tp,
        create_gloo_process_groups=False,
    )
    with torch.random.fork_rng(devices=[] if start.ON_CPU else [torch.cuda.current_device()]):
        model_parallel_cuda_manual_seed(1)
