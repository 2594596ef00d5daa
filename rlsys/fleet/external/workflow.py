"""AReaL's rollout_batch: one episode a row, all at once, their trajectories padded into one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlsys.protocol import DataProto

Trajectory = Mapping[str, Tensor]
PADS = {"versions": -1, "turn_ids": -1}


async def run_workflow(engine: object, data: Sequence[Mapping[str, Any]], workflow: Any) -> DataProto:
    """Run AReaL's `arun_episode(engine, row)`, or a function like it, on every row at once.

    It gives tensors (n, T) or (n,) by name, or None to reject the row. Returns the trajectories of the other rows in
    their order; meta_info counts `accepted` and `rejected`. The first error of a row ends the others and is raised with
    the row's number; ValueError where all are rejected.
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
    rows = {name: [row for trajectory in trajectories for row in trajectory[name]] for name in names}
    return {
        name: pad_sequence(of, batch_first=True, padding_value=PADS.get(name, 0)) if of[0].ndim else torch.stack(of)
        for name, of in rows.items()
    }
