"""Which role holds memory when: the moves of a shared pool."""

from functools import partial
from types import SimpleNamespace

import pytest

from rlsys.config import load_config
from rlsys.telemetry.metrics import StageTimer
from trainer.assembly import residency_moves
from trainer.groups import WorkerGroups
from trainer.residency import Moves, Residency, Resident
from trainer.weight_push import drops_weights_on_sleep


def recorded_moves() -> tuple[Residency, list[str]]:
    done: list[str] = []
    residents = (Resident.ACTOR, Resident.REFERENCE, Resident.ROLLOUT, Resident.SYNC)
    moves = {h: Moves([partial(done.append, f"enter {h}")], [partial(done.append, f"leave {h}")]) for h in residents}
    return Residency(moves, StageTimer()), done


def test_offloading_all_spares_the_rollout() -> None:
    residency, done = recorded_moves()
    residency.offload_all()
    assert done == ["leave actor", "leave reference"]
    assert residency.resident is Resident.NONE


def test_moves_run_only_when_the_resident_changes() -> None:
    residency, done = recorded_moves()
    with residency.hold(Resident.SYNC, "push"), residency.hold(Resident.ROLLOUT, "gen"):
        pass
    with residency.hold(Resident.ROLLOUT, "testing"):
        pass
    assert done == ["enter sync", "leave sync", "enter rollout"]
    with pytest.raises(AssertionError, match=r"call push_weights\(\) before"):
        recorded_moves()[0].enter(Resident.ROLLOUT)


def test_a_rollout_without_weights_gets_them_again_before_it_serves_unless_new_ones_came() -> None:
    done: list[str] = []
    moves = {h: Moves([partial(done.append, f"enter {h}")]) for h in (Resident.ACTOR, Resident.ROLLOUT, Resident.SYNC)}
    residency = Residency(moves, StageTimer(), partial(done.append, "push again"))
    for resident in (Resident.SYNC, Resident.ROLLOUT, Resident.ACTOR, Resident.SYNC, Resident.ROLLOUT):
        residency.enter(resident)
    assert done == ["enter sync", "enter rollout", "enter actor", "enter sync", "enter rollout"]
    done.clear()
    for resident in (Resident.ACTOR, Resident.ROLLOUT, Resident.ROLLOUT):
        residency.enter(resident)
    assert done == ["enter actor", "enter sync", "push again", "enter rollout"]


@pytest.mark.parametrize("frees", [True, False])
def test_free_cache_engine_decides_whether_the_rollout_moves(frees: bool) -> None:
    rollout = "actor_rollout_ref.rollout"
    files = ("data.train_files=null", "data.val_files=null", "actor_rollout_ref.model.path=null")
    cfg = load_config([*files, f"{rollout}.name=vllm", f"{rollout}.free_cache_engine={frees}"])
    groups = WorkerGroups(actor=SimpleNamespace(), rollout=SimpleNamespace(sleep=print, wake=print))
    assert (Resident.ROLLOUT in residency_moves(cfg, groups, "cuda:0", colocated=True)) is frees
    assert drops_weights_on_sleep(cfg) is frees
    assert Resident.ROLLOUT not in residency_moves(cfg, groups, "cuda:0", colocated=False)
    assert Resident.ROLLOUT not in residency_moves(cfg, groups, "cpu", colocated=True)
