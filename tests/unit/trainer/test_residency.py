"""Who holds memory when: the moves of a shared pool."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from rlsys.config import load_config
from rlsys.telemetry.metrics import StageTimer
from trainer.assembly import residency_moves
from trainer.groups import WorkerGroups
from trainer.residency import Holder, Moves, Residency
from trainer.rollouts import gives_up_weights


def told_moves() -> tuple[Residency, list[str]]:
    done: list[str] = []
    holders = (Holder.ACTOR, Holder.REFERENCE, Holder.ROLLOUT, Holder.SYNC)
    moves = {h: Moves(partial(done.append, f"enter {h}"), partial(done.append, f"leave {h}")) for h in holders}
    return Residency(moves, StageTimer()), done


def test_parking_offloads_what_is_loaded_but_not_the_rollout() -> None:
    residency, done = told_moves()
    residency.park()
    assert done == ["leave actor", "leave reference"]
    assert residency.holder is Holder.NONE


def test_a_turn_takes_memory_when_it_changes_hands_only() -> None:
    residency, done = told_moves()
    with residency.turn(Holder.SYNC, "push"), residency.turn(Holder.ROLLOUT, "gen"):
        pass
    with residency.turn(Holder.ROLLOUT, "testing"):
        pass
    assert done == ["enter sync", "leave sync", "enter rollout"]
    with pytest.raises(AssertionError, match="no move leads"):
        residency.enter(Holder.NONE)


def test_a_rollout_without_weights_gets_them_again_before_it_serves_unless_new_ones_came() -> None:
    done: list[str] = []
    moves = {h: Moves(partial(done.append, f"enter {h}")) for h in (Holder.ACTOR, Holder.ROLLOUT, Holder.SYNC)}
    residency = Residency(moves, StageTimer(), partial(done.append, "push again"))
    for holder in (Holder.SYNC, Holder.ROLLOUT, Holder.ACTOR, Holder.SYNC, Holder.ROLLOUT):
        residency.enter(holder)
    assert done == ["enter sync", "enter rollout", "enter actor", "enter sync", "enter rollout"]
    done.clear()
    for holder in (Holder.ACTOR, Holder.ROLLOUT, Holder.ROLLOUT):
        residency.enter(holder)
    assert done == ["enter actor", "enter sync", "push again", "enter rollout"]


@pytest.mark.parametrize("frees", [True, False])
def test_free_cache_engine_says_whether_the_rollout_moves(frees: bool) -> None:
    rollout = "actor_rollout_ref.rollout"
    files = ("data.train_files=null", "data.val_files=null", "actor_rollout_ref.model.path=null")
    cfg = load_config([*files, f"{rollout}.name=vllm", f"{rollout}.free_cache_engine={frees}"])
    groups = WorkerGroups(actor=SimpleNamespace(), rollout=SimpleNamespace(sleep=print, wake=print))
    assert (Holder.ROLLOUT in residency_moves(cfg, groups, "cuda:0", colocated=True)) is frees
    assert gives_up_weights(cfg) is frees
    assert Holder.ROLLOUT not in residency_moves(cfg, groups, "cuda:0", colocated=False)
    assert Holder.ROLLOUT not in residency_moves(cfg, groups, "cpu", colocated=True)
