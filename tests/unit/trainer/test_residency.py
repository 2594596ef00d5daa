"""Which role holds memory when: the moves of a shared pool."""

from functools import partial
from types import SimpleNamespace

import pytest

from rlsys.config import load_config
from rlsys.telemetry.metrics import StageTimer
from trainer.assembly import residency_moves
from trainer.groups import Role, WorkerGroups
from trainer.loop import CheckpointedLoop
from trainer.ppo import RayPPOTrainer
from trainer.residency import SYNC, Moves, Residency
from trainer.weight_push import drops_weights_on_sleep


def recorded_moves() -> tuple[Residency, list[str]]:
    done: list[str] = []
    residents = (Role.Actor, Role.RefPolicy, Role.Rollout, SYNC)
    moves = {h: Moves([partial(done.append, f"enter {h}")], [partial(done.append, f"leave {h}")]) for h in residents}
    return Residency(moves, StageTimer()), done


def test_all_roles_leave_and_nothing_is_served_before_the_next_push() -> None:
    residency, done = recorded_moves()
    residency.enter(SYNC)
    residency.offload_all()
    assert done == ["enter sync", "leave actor", "leave rollout", "leave ref"]
    assert residency.resident is None
    with pytest.raises(AssertionError, match=r"call push_weights\(\) before"):
        residency.enter(Role.Rollout)


def test_moves_run_only_when_the_resident_changes() -> None:
    residency, done = recorded_moves()
    with residency.hold(SYNC, "push"), residency.hold(Role.Rollout, "gen"):
        pass
    with residency.hold(Role.Rollout, "testing"):
        pass
    assert done == ["enter sync", "leave sync", "enter rollout"]
    with pytest.raises(AssertionError, match=r"call push_weights\(\) before"):
        recorded_moves()[0].enter(Role.Rollout)


def test_only_a_role_with_parts_on_the_host_enters_to_be_saved() -> None:
    residency, done = recorded_moves()
    residency.enter(SYNC)
    done.clear()
    residency.enter_to_save(Role.Critic)
    assert (residency.resident, done) == (SYNC, [])
    residency.enter_to_save(Role.Actor)
    assert (residency.resident, done) == (Role.Actor, ["leave sync", "enter actor"])


def test_a_rollout_without_weights_gets_them_again_before_it_serves_unless_new_ones_came() -> None:
    done: list[str] = []
    moves = {h: Moves([partial(done.append, f"enter {h}")]) for h in (Role.Actor, Role.Rollout, SYNC)}
    residency = Residency(moves, StageTimer())
    residency.refill = partial(done.append, "push again")
    for resident in (SYNC, Role.Rollout, Role.Actor, SYNC, Role.Rollout):
        residency.enter(resident)
    assert done == ["enter sync", "enter rollout", "enter actor", "enter sync", "enter rollout"]
    done.clear()
    for resident in (Role.Actor, Role.Rollout, Role.Rollout):
        residency.enter(resident)
    assert done == ["enter actor", "enter sync", "push again", "enter rollout"]


@pytest.mark.parametrize("frees", [True, False])
def test_free_cache_engine_decides_whether_the_rollout_moves(frees: bool) -> None:
    rollout = "actor_rollout_ref.rollout"
    files = ("data.train_files=null", "data.val_files=null", "actor_rollout_ref.model.path=null")
    cfg = load_config([*files, f"{rollout}.name=vllm", f"{rollout}.free_cache_engine={frees}"])
    groups = WorkerGroups(actor=SimpleNamespace(), rollout=SimpleNamespace(sleep=print, wake=print))
    assert (Role.Rollout in residency_moves(cfg, groups, "cuda:0", colocated=True)) is frees
    assert drops_weights_on_sleep(cfg) is frees
    assert Role.Rollout not in residency_moves(cfg, groups, "cuda:0", colocated=False)
    assert Role.Rollout not in residency_moves(cfg, groups, "cpu", colocated=True)


def test_a_checkpoint_is_loaded_onto_devices_that_no_other_role_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    residency, done = recorded_moves()
    residency.enter(SYNC)
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer._parts = SimpleNamespace(steps=SimpleNamespace(residency=residency))  # pyrefly: ignore
    monkeypatch.setattr(CheckpointedLoop, "resume", lambda self: done.append("load"))
    trainer.resume()
    assert done == ["enter sync", "leave actor", "leave rollout", "leave ref", "load"]
