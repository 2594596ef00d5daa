"""Which roles run where, and the worker groups they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rlsys.config.schema.trainer import DeadlinesConfig
from rlsys.single_controller.base import ClassWithInitArgs, WorkerGroup
from rlsys.single_controller.colocate import create_colocated_worker_cls
from rlsys.single_controller.resource_pool import ResourcePoolManager
from rlsys.telemetry.recorder import StageReport, merged


class Role(Enum):
    """What a worker group does."""

    Actor = "actor"
    Rollout = "rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class WorkerGroups:
    """The groups of a run; roles that the algorithm does not need or that others play are None."""

    actor: Any
    rollout: Any = None
    critic: Any = None
    ref: Any = None
    rm: Any = None

    def save(self, folder: Path) -> None:
        """Write the trained roles' parts of a checkpoint."""
        for name, group in self._trained().items():
            group.save_checkpoint(str(folder / name))

    def load(self, folder: Path) -> None:
        """Read them back."""
        for name, group in self._trained().items():
            group.load_checkpoint(str(folder / name))

    def drain_stages(self) -> StageReport:
        """What the workers noted of their stages since the last time."""
        return merged(group.drain_stages() for group in self._all())

    def close(self) -> None:
        """End the workers of all roles."""
        for group in self._all():
            group.close()

    def _all(self) -> list[Any]:
        return [group for group in (self.actor, self.rollout, self.critic, self.ref, self.rm) if group is not None]

    def _trained(self) -> dict[str, Any]:
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})


def deadlines_of(deadlines: DeadlinesConfig) -> dict[str, float]:
    """Seconds by stage, i.e. by the method that a group is asked for."""
    update, save, weights = deadlines.update_s, deadlines.save_s, deadlines.weights_s
    return {
        "default": deadlines.call_s,
        "start": deadlines.start_s,
        "init_model": deadlines.start_s,
        "generate_sequences": deadlines.generate_s,
        "update_actor": update,
        "update_critic": update,
        "train_batch": update,
        "save_checkpoint": save,
        "load_checkpoint": save,
        "open_weight_transfer": weights,
        "send_weights": weights,
        "receive_weights": weights,
    }


def start_groups(
    mapping: Mapping[Role, ClassWithInitArgs],
    manager: ResourcePoolManager[Any],
    *,
    group_cls: Callable[..., WorkerGroup],
    deadlines: Mapping[str, float],
) -> WorkerGroups:
    """Start one process group per pool, each process playing all roles of its pool, and load the models."""
    manager.create_resource_pool()
    by_pool: dict[str, dict[str, ClassWithInitArgs]] = {}
    for role, made in mapping.items():
        by_pool.setdefault(manager.mapping[role], {})[role.value] = made
    groups: dict[str, Any] = {}
    try:
        for pool, roles in by_pool.items():
            group = group_cls(
                manager.resource_pool_dict[pool],
                create_colocated_worker_cls(roles),
                role="+".join(roles),
                deadlines=deadlines,
            )
            groups |= group.spawn(list(roles))
        for group in groups.values():
            group.init_model()
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    return WorkerGroups(**groups)
