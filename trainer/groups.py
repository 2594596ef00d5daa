"""The roles of a run, the worker groups that play them, and what the trainer calls on each group."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from rlsys.config.schema.trainer import DeadlinesConfig, ProfilerConfig, RunConfig
from rlsys.protocol import DataProto
from rlsys.roles.update import RankSums
from rlsys.single_controller.base import ClassWithInitArgs, WorkerGroup
from rlsys.single_controller.colocate import create_colocated_worker_cls
from rlsys.single_controller.resource_pool import ResourcePoolManager
from rlsys.telemetry.log import get_logger
from rlsys.telemetry.recorder import StageReport, merged
from rlsys.utils.errors import ConfigError
from rlsys.weights.executors.base import WeightGroup
from trainer.backend import WorkerBackend

log = get_logger(__name__)
R = TypeVar("R")


class Role(StrEnum):
    """What a worker group does."""

    Actor = "actor"
    Rollout = "rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    Teacher = "teacher"
    Judge = "judge"


class Group(WeightGroup, Protocol):
    """What every worker group offers; the protocols below add the registered methods of a role's workers."""

    role: str

    def init_model(self) -> None: ...
    def start_profile(self, config: ProfilerConfig, name: str) -> None: ...
    def stop_profile(self) -> None: ...
    def drain_stages(self) -> StageReport: ...
    def close(self) -> None: ...


class EngineGroup(Group, Protocol):
    """A role on a training engine."""

    def move(self, parts: Sequence[str], device: str) -> None: ...
    def save_checkpoint(self, path: str, background: bool = False) -> None: ...
    def is_saved(self) -> list[bool]: ...
    def finish_save(self) -> None: ...
    def load_checkpoint(self, path: str) -> None: ...
    def export(self, path: str, what: Literal["export", "adapter"] = "export") -> None: ...


class ReferenceGroup(EngineGroup, Protocol):
    """The frozen policy."""

    def compute_ref_log_prob(self, data: DataProto) -> DataProto: ...


class TeacherGroup(EngineGroup, Protocol):
    """The models of a distillation."""

    def compute_teacher_log_prob(self, data: DataProto) -> DataProto: ...


class ActorGroup(ReferenceGroup, Protocol):
    """The policy that is trained; with LoRA also the reference."""

    def compute_log_prob(self, data: DataProto) -> DataProto: ...
    def update_actor(self, data: DataProto) -> DataProto: ...


class CriticGroup(EngineGroup, Protocol):
    """The value function."""

    def compute_values(self, data: DataProto) -> DataProto: ...
    def update_critic(self, data: DataProto) -> DataProto: ...


class RewardModelGroup(Group, Protocol):
    """A trained model as grader."""

    def compute_rm_score(self, data: DataProto) -> DataProto: ...


class SupervisedGroup(EngineGroup, Protocol):
    """A language model or a reward model trained on given rows."""

    def train_batch(self, data: DataProto) -> DataProto: ...
    def eval_batch(self, data: DataProto) -> list[RankSums]: ...


class RolloutGroup(Group, Protocol):
    """Engines that complete prompts."""

    def compute_log_prob(self, data: DataProto) -> DataProto: ...
    def sleep(self, tags: Sequence[str]) -> None: ...
    def wake(self, tags: Sequence[str]) -> None: ...


@dataclass(frozen=True)
class WorkerGroups:
    """The groups of a run; a role that the algorithm does not need, or that another group plays, is None.

    `rollout` is None only with external servers.
    """

    actor: ActorGroup
    rollout: RolloutGroup | None = None
    critic: CriticGroup | None = None
    ref: ReferenceGroup | None = None
    rm: RewardModelGroup | None = None
    teacher: TeacherGroup | None = None
    judge: RolloutGroup | None = None

    @property
    def trained(self) -> Mapping[str, EngineGroup]:
        """The trained roles by the name of their folder in a checkpoint."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})

    @property
    def all(self) -> list[Group]:
        return [group for group in vars(self).values() if group is not None]

    def save(self, folder: Path, enter: Callable[[Role], object], *, background: Collection[EngineGroup] = ()) -> None:
        """Write the trained roles' parts of a checkpoint, each after `enter`, some in the `background`."""
        for name, group in self.trained.items():
            enter(Role(name))
            group.save_checkpoint(str(folder / name), group in background)

    def load(self, folder: Path) -> None:
        """Read the trained roles' parts of a checkpoint."""
        for name, group in self.trained.items():
            if not (folder / name).is_dir():
                why = f"trainer.max_{name}_ckpt_to_keep removed it, or its run had none"
                how = "resume another step, set its algorithm.adv_estimator, or set trainer.resume_mode=disable"
                raise ConfigError(f"{folder} has no {name}: {why}; {how}")
            group.load_checkpoint(str(folder / name))

    def drain_stages(self) -> StageReport:
        """Spans and memory of the workers' stages since the last call."""
        return merged(group.drain_stages() for group in self.all)

    def close(self) -> None:
        """End the workers of all roles."""
        for group in self.all:
            group.close()


def stage_deadlines(deadlines: DeadlinesConfig) -> dict[str, float]:
    """Seconds by stage, that is by the name of the method called on a group."""
    stages_of = (
        (deadlines.call_s, ("default",)),
        (deadlines.start_s, ("start", "init_model")),
        (deadlines.update_s, ("update_actor", "update_critic", "train_batch")),
        (deadlines.save_s, ("save_checkpoint", "finish_save", "load_checkpoint")),
        (deadlines.weights_s, ("open_weight_transfer", "send_weights", "receive_weights")),
    )
    return {stage: seconds for seconds, stages in stages_of for stage in stages}


def start_groups(
    workers: Mapping[R, ClassWithInitArgs],
    manager: ResourcePoolManager,
    *,
    group_cls: Callable[..., WorkerGroup],
    deadlines: DeadlinesConfig,
    offloaded: Mapping[R, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Start one process group per pool, each process playing all roles of its pool, and load the models in their order.

    The pool with the largest part of a node comes first, as `check_capacity` places it: Ray gives each part the node
    that has most left.

    The parts of a role that are `offloaded` leave the device before the next role loads. Returns a group for each role,
    untyped: the caller knows the protocol of each.
    """
    manager.create_resource_pool()
    leaving = {str(role): parts for role, parts in (offloaded or {}).items()}
    by_pool: dict[str, dict[str, ClassWithInitArgs]] = {}
    for role, worker in workers.items():
        by_pool.setdefault(manager.mapping[role], {})[str(role)] = worker
    groups: dict[str, Any] = {}
    try:
        for pool, roles in sorted(by_pool.items(), key=lambda item: -max(manager.resource_pool_spec[item[0]])):
            cls, resources = create_colocated_worker_cls(roles), manager.resource_pool_dict[pool]
            group = group_cls(resources, cls, role="+".join(roles), deadlines=stage_deadlines(deadlines))
            groups |= group.spawn(list(roles))
        for name, group in groups.items():
            log.info("loading the model of %s", name)
            group.init_model()
            if parts := leaving.get(name):
                group.move(parts, "cpu")
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    return groups


def start_group(backend: WorkerBackend, run: RunConfig, role: str, worker: type, *args: object) -> Any:
    """The group of a job with one role, on all its processes; `args` build each `worker`."""
    manager = backend.make_manager({"train": [run.n_gpus_per_node] * run.nnodes}, {role: "train"})
    workers = {role: backend.worker_cls(worker, *args)}
    return start_groups(workers, manager, group_cls=backend.group_cls, deadlines=run.deadlines)[role]
