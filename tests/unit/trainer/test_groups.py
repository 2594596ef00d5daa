"""Roles on pools: one process group per pool, all of them closed when one fails to start."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlsys.config.schema.trainer import DeadlinesConfig
from rlsys.single_controller.base import ClassWithInitArgs
from rlsys.single_controller.resource_pool import ResourcePoolManager
from rlsys.telemetry.recorder import StageReport
from rlsys.utils.errors import ConfigError
from trainer.groups import Role, WorkerGroups, stage_deadlines, start_groups


class Group:
    """Records what is called; every role of a pool is a group of its own."""

    log: ClassVar[list[str]] = []
    broken = ""

    def __init__(self, pool: Any, worker: Any, *, role: str, deadlines: Any) -> None:
        self.role = role
        Group.log.append(f"start {role} on {pool.world_size}")

    def spawn(self, roles: list[str]) -> "dict[str, Group]":
        return {role: Group.view(role) for role in roles}

    @classmethod
    def view(cls, role: str) -> "Group":
        view = cls.__new__(cls)
        view.role = role
        return view

    def init_model(self) -> None:
        if self.role == Group.broken:
            raise RuntimeError(f"{self.role} is broken")
        Group.log.append(f"init {self.role}")

    def move(self, parts: tuple[str, ...], device: str) -> None:
        Group.log.append(f"move {' and '.join(parts)} of {self.role} to {device}")

    def save_checkpoint(self, path: str, background: bool = False) -> None:
        Group.log.append(f"save {Path(path).name}")

    def drain_stages(self) -> StageReport:
        return StageReport()

    def close(self) -> None:
        Group.log.append(f"close {self.role}")


@pytest.fixture(autouse=True)
def empty_log() -> None:
    Group.log, Group.broken = [], ""


def start(**offloaded: tuple[str, ...]) -> WorkerGroups:
    mapping = {Role.Actor: "train", Role.Critic: "train", Role.Rollout: "rollout"}
    manager = ResourcePoolManager({"train": [2], "rollout": [1]}, mapping)
    workers = {role: ClassWithInitArgs(object) for role in mapping}
    leaving = {Role(role): parts for role, parts in offloaded.items()}
    groups = start_groups(workers, manager, group_cls=Group, deadlines=DeadlinesConfig(), offloaded=leaving)  # pyrefly: ignore[bad-argument-type]
    return WorkerGroups(**groups)


def test_roles_of_a_pool_share_its_processes() -> None:
    groups = start()
    assert Group.log[:2] == ["start actor+critic on 2", "start rollout on 1"]
    assert Group.log[2:] == ["init actor", "init critic", "init rollout"]
    assert groups.ref is None
    assert list(groups.trained) == ["actor", "critic"]


def test_what_is_offloaded_leaves_before_the_next_role_loads() -> None:
    start(actor=("params", "optimizer"), critic=(), ref=("params",))
    loaded = ["init actor", "move params and optimizer of actor to cpu", "init critic", "init rollout"]
    assert Group.log[2:] == loaded


def test_a_group_that_fails_to_load_closes_all() -> None:
    Group.broken = "critic"
    with pytest.raises(RuntimeError, match="critic is broken"):
        start()
    assert Group.log[-3:] == ["close actor", "close critic", "close rollout"]


def test_only_trained_roles_are_saved_and_all_are_closed(tmp_path: Path) -> None:
    groups = start()
    Group.log.clear()
    groups.save(tmp_path, lambda role: Group.log.append(f"enter {role}"))
    groups.close()
    assert Group.log == [
        "enter actor",
        "save actor",
        "enter critic",
        "save critic",
        "close actor",
        "close rollout",
        "close critic",
    ]


def test_a_checkpoint_without_a_role_names_what_may_have_removed_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no actor: trainer\.max_actor_ckpt_to_keep removed it"):
        start().load(tmp_path)


def test_stages_have_the_deadline_of_their_kind() -> None:
    deadlines = stage_deadlines(DeadlinesConfig(call_s=1, start_s=2, update_s=3, weights_s=4, save_s=5))
    names = ("default", "init_model", "update_critic", "send_weights", "load_checkpoint")
    assert [deadlines[name] for name in names] == [1, 2, 3, 4, 5]
