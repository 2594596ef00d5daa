"""AReaL's rollout_batch: one episode a row, all at once, their trajectories padded into one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlsys.protocol import DataProto

Trajectory = Mapping[str, Tensor]
PADS = {"versions": -1, "turn_ids": -1}


class RolloutWorkflow(Protocol):
    """A workflow as AReaL has it."""

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> Trajectory | None: ...


WorkflowLike = RolloutWorkflow | Callable[[Any, Mapping[str, Any]], Awaitable[Trajectory | None]]
"""(engine, row) -> tensors (n, T) or (n,) by name, or None to reject the row."""


async def run_workflow(engine: object, data: Sequence[Mapping[str, Any]], workflow: WorkflowLike) -> DataProto:
    """The trajectories of all rows that were not rejected, in their order; meta_info counts `accepted` and `rejected`.

    The first error of a row ends the others and is raised with the row's number; ValueError where all are rejected.
    """
    run = workflow if callable(workflow) else workflow.arun_episode

    async def episode(number: int, row: Mapping[str, Any]) -> Trajectory | None:
        try:
            return await run(engine, row)
        except Exception as error:
            error.add_note(f"rollout_batch: row {number}")
            raise

    tasks = [asyncio.ensure_future(episode(number, row)) for number, row in enumerate(data)]
    try:
        trajectories = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    kept = [trajectory for trajectory in trajectories if trajectory is not None]
    if not kept:
        raise ValueError(f"the workflow rejected all {len(trajectories)} rows")
    meta = {"accepted": len(kept), "rejected": len(trajectories) - len(kept)}
    return DataProto.from_dict(padded(kept), meta_info=meta)


def padded(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """All trajectories below each other, padded on the right: with 0, versions and turn_ids with -1."""
    names = trajectories[0].keys()
    if any(trajectory.keys() != names for trajectory in trajectories):
        raise ValueError("the workflow's trajectories have different fields")
    return {name: _stack([trajectory[name] for trajectory in trajectories], PADS.get(name, 0)) for name in names}


def _stack(parts: Sequence[Tensor], pad: int) -> Tensor:
    if parts[0].ndim < 2:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=pad) for part in parts])
