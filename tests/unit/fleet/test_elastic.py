"""Replicas join and leave an elastic fleet: no request is lost, and none is served by weights that are not current."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from rlsys.fleet.elastic import ElasticFleet
from rlsys.fleet.fleet import FleetDeadlines
from rlsys.protocol import DataProto
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError
from tests.timing import scaled_s, wait_until
from tests.unit.fleet.test_fleet import Scripted, assert_answered, quick, requests_of, results


class Elastic(Scripted):
    """A replica whose node the test places, drains and loses."""

    def __init__(self, rank: int, *, running: bool = True) -> None:
        super().__init__(f"replica {rank}")
        self.rank, self.alive = rank, running
        self.placed = self.draining = self.quarantined = self.starts_until_killed = self.is_starting = False
        self.killed = threading.Event()

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return {**super().health(deadline_s), "quarantined": self.quarantined}

    def restart(self, deadline_s: float) -> None:
        super().restart(deadline_s)
        self.quarantined = True
        if self.starts_until_killed:
            self.is_starting = True
            self.killed.wait(deadline_s)
            self.is_starting = False

    def compute_log_prob(self, data: DataProto) -> DataProto:
        return data


class Nodes:
    """Where the replicas are."""

    def __init__(self, replicas: Sequence[Elastic]) -> None:
        self.replicas = replicas

    @property
    def present(self) -> list[int]:
        return [replica.rank for replica in self.replicas if replica.alive]

    def is_draining(self, rank: int) -> bool:
        return self.replicas[rank].draining

    def vacate(self, rank: int) -> int:
        self.replicas[rank].alive = self.replicas[rank].draining = False
        return rank

    def kill(self, rank: int) -> None:
        self.replicas[rank].killed.set()

    def is_placed(self, place: int, wait_s: float) -> bool:
        return wait_until(lambda: self.replicas[place].placed, wait_s)


class Weights:
    """Pushes reach the replicas that were connected last; a restart is not restored, but by copies if they work."""

    def __init__(self, *, copies: bool = True) -> None:
        self.connected: list[tuple[int, ...]] = []
        self.copies = copies
        self.copied: list[tuple[int, int]] = []

    def push(self, fleet: ElasticFleet, version: int, *, breaks: bool = False) -> None:
        with fleet.pushing(version):
            for rank in self.connected[-1]:
                replica = fleet.places.replicas[rank]
                replica.quarantined = breaks
                replica.version = replica.version if breaks else version
            if breaks:
                raise WeightTransferError("a rank is lost")

    def copy(self, peer: Elastic, newcomer: Elastic) -> None:
        if not self.copies:
            raise WeightTransferError("the peer did not answer")
        newcomer.version, newcomer.quarantined = peer.version, peer.quarantined
        self.copied.append((peer.rank, newcomer.rank))


def no_restore(replica: Any) -> None:
    raise WeightTransferError("push again")


@contextmanager
def elastic(
    replicas: Sequence[Elastic], weights: Weights, min_replicas: int = 1, max_attempts: int = 3
) -> Iterator[ElasticFleet]:
    fleet = ElasticFleet(
        replicas,
        min_replicas=min_replicas,
        places=Nodes(replicas),
        connect=weights.connected.append,
        copy=weights.copy,
        on_restart=no_restore,
        chunk_rows=3,
        deadlines=quick(),
        max_attempts=max_attempts,
    )
    try:
        yield fleet
    finally:
        fleet.close()


def ready(fleet: ElasticFleet) -> float:
    return fleet.metrics()["rollout/replicas_ready"]


def test_a_newcomer_serves_with_the_weights_of_a_peer_before_the_next_push() -> None:
    here, late, weights = Elastic(0), Elastic(1, running=False), Weights()
    with elastic([here, late], weights) as fleet:
        weights.push(fleet, 1)
        assert_answered(requests_of(9), results(fleet.submit(requests_of(9))))
        assert (late.calls, late.restarts) == (0, 0)
        late.placed = True
        assert wait_until(lambda: ready(fleet) == 2, 10)
        assert (late.version, weights.copied, weights.connected) == (1, [(0, 1)], [(0,)])
        assert_answered(requests_of(40), results(fleet.submit(requests_of(40))))
        counts = fleet.metrics()
        assert [counts[f"rollout/{name}"] for name in ("joined", "left", "waited_for_push")] == [1, 0, 0]
        weights.push(fleet, 2)
        weights.push(fleet, 3)
        assert weights.connected == [(0,), (0, 1)]
    assert late.served
    assert sorted(here.served[9:] + late.served) == sorted(request.rid for request in requests_of(40))


def test_a_peer_that_sent_is_connected_again_though_the_newcomer_is_lost() -> None:
    here, late, weights = Elastic(0), Elastic(1, running=False), Weights()
    with elastic([here, late], weights) as fleet:
        weights.push(fleet, 1)
        late.placed = True
        assert wait_until(lambda: ready(fleet) == 2, 10)
        late.placed = late.alive = False
        weights.push(fleet, 2)
        assert weights.connected == [(0,), (0,)]


def join_without_weights(fleet: ElasticFleet, weights: Weights, late: Elastic) -> None:
    """Find a place for a newcomer after the first push, and see it wait for the second."""
    weights.push(fleet, 1)
    late.placed = True
    assert wait_until(lambda: fleet.metrics()["rollout/waited_for_push"], 10)


def test_a_newcomer_that_no_peer_can_send_to_serves_from_the_next_push() -> None:
    here, late, weights = Elastic(0), Elastic(1, running=False), Weights(copies=False)
    with elastic([here, late], weights) as fleet:
        join_without_weights(fleet, weights, late)
        assert (late.version, late.calls, ready(fleet)) == (-100, 0, 1)
        weights.push(fleet, 2)
        assert (ready(fleet), fleet.metrics()["rollout/joined"]) == (2, 1)
        assert weights.connected == [(0,), (0, 1)]


def test_a_newcomer_that_is_lost_before_its_first_push_does_not_take_part() -> None:
    here, late, weights = Elastic(0), Elastic(1, running=False), Weights(copies=False)
    with elastic([here, late], weights) as fleet:
        join_without_weights(fleet, weights, late)
        late.placed = late.alive = False
        weights.push(fleet, 2)
        assert weights.connected[-1] == (0,)
        assert fleet.metrics()["rollout/left"] == 0


def test_nothing_is_copied_from_a_peer_that_a_push_left_incomplete() -> None:
    here, late, weights = Elastic(0), Elastic(1, running=False), Weights()
    with elastic([here, late], weights) as fleet:
        weights.push(fleet, 1)
        with pytest.raises(WeightTransferError):
            weights.push(fleet, 2, breaks=True)
        late.placed = True
        assert wait_until(lambda: fleet.metrics()["rollout/waited_for_push"], 10)
        assert (weights.copied, ready(fleet)) == ([], 1)


def test_a_newcomer_without_the_current_weights_is_not_admitted() -> None:
    here, late, weights = Elastic(0), Elastic(1, running=False), Weights(copies=False)
    late.placed = True
    with elastic([here, late], weights) as fleet:
        assert wait_until(lambda: late.restarts, 10)
        with fleet.pushing(1):
            here.version = 1
        assert ready(fleet) == 1
        assert late.calls == 0


def test_a_replica_that_failed_once_serves_on_with_the_weights_that_it_has() -> None:
    here, weights = Elastic(0), Weights(copies=False)
    with elastic([here], weights) as fleet:
        weights.push(fleet, 1)
        here.plan = lambda call: "raise" if call == 1 else "ok"
        assert_answered(requests_of(9), results(fleet.submit(requests_of(9))))
        assert weights.connected == [(0,)]
        assert [fleet.metrics()[f"rollout/{name}"] for name in ("joined", "left")] == [0, 0]


def test_a_start_ends_with_the_fleet() -> None:
    here, late, weights = Elastic(0), Elastic(1, running=False), Weights()
    late.placed, late.starts_until_killed = True, True
    with elastic([here, late], weights):
        assert wait_until(lambda: late.restarts, 10)
    assert late.killed.is_set()
    assert not late.is_starting


def test_requests_of_a_drained_and_of_a_lost_replica_continue() -> None:
    replicas, weights = [Elastic(rank) for rank in range(3)], Weights()
    with elastic(replicas, weights) as fleet:
        weights.push(fleet, 1)
        requests = requests_of(60, num_tokens=300)
        answers = fleet.submit(requests)
        replicas[0].draining, replicas[1].alive = True, False
        assert wait_until(lambda: ready(fleet) == 2, 10)
        weights.push(fleet, 2)
        assert_answered(requests, results(answers))
        counts = fleet.metrics()
        assert [counts[f"rollout/{name}"] for name in ("issued", "answered", "dropped", "left")] == [60, 60, 0, 2]
        assert weights.connected[-1] == (2,)
        replicas[0].placed = True
        assert wait_until(lambda: replicas[0].restarts, 10)
        weights.push(fleet, 3)
        assert weights.connected[-1] == (0, 2)


def test_given_responses_wait_for_a_replica_that_serves_and_then_name_those_that_do_not() -> None:
    here, late, weights = Elastic(0, running=False), Elastic(1, running=False), Weights()
    rows = DataProto(meta_info={"asked": True})
    with elastic([here, late], weights) as fleet:
        away = (
            r"^replica 0 \(away\), replica 1 \(away\) did not answer within .* 'compute_log_prob': no replica serves$"
        )
        with pytest.raises(DeadlineError, match=away):
            fleet.compute_log_prob(rows)
        late.placed = True
        assert wait_until(lambda: late.restarts, 10)
        serving = threading.Thread(target=weights.push, args=(fleet, 1))
        serving.start()
        assert fleet.compute_log_prob(rows) is rows
        serving.join(scaled_s(10))


def test_a_replica_that_a_health_check_takes_out_in_an_exchange_leaves_once() -> None:
    here, lost, weights = Elastic(0), Elastic(1), Weights()
    entered, release = threading.Event(), threading.Event()
    with elastic([here, lost], weights) as fleet:
        weights.push(fleet, 1)
        lost.plan = lambda call: "die" if entered.set() or release.wait(scaled_s(10)) else "ok"
        answers = fleet.submit(requests_of(6, num_tokens=30))
        assert entered.wait(scaled_s(10))
        lost.alive = False
        fleet.check_health()
        release.set()
        assert_answered(requests_of(6, num_tokens=30), results(answers))
        lost.plan, lost.placed = lambda call: "ok", True
        assert wait_until(lambda: lost.restarts, 10)
        assert fleet.metrics()["rollout/left"] == 1


def test_a_push_waits_for_a_replica_where_all_are_lost_in_their_last_exchange() -> None:
    here, weights = Elastic(0), Weights()
    entered, release = threading.Event(), threading.Event()
    with elastic([here], weights) as fleet:
        weights.push(fleet, 1)
        here.placed, dying = True, iter(["die"])
        here.plan = lambda call: next(dying, "ok") if entered.set() or release.wait(scaled_s(10)) else "ok"
        answers = fleet.submit(requests_of(6, num_tokens=30))
        assert entered.wait(scaled_s(10))
        later = threading.Timer(0.3, release.set)  # by then the push waits for the exchange to end
        later.start()
        weights.push(fleet, 2)
        later.join()
        assert (weights.connected[-1], here.restarts, here.version) == ((0,), 1, 2)
        assert_answered(requests_of(6, num_tokens=30), results(answers))


def test_too_few_replicas_end_the_push() -> None:
    replicas, weights = [Elastic(0), Elastic(1)], Weights()
    with elastic(replicas, weights, min_replicas=2) as fleet:
        weights.push(fleet, 1)
        fleet.deadlines = quick().__class__(generate_s=scaled_s(5), restart_s=0.2)
        replicas[1].alive = False
        with pytest.raises(RolloutError, match=r"min_replicas=2, and no node with room for replica 1 for 0\.2 s"):
            weights.push(fleet, 2)


@pytest.mark.parametrize("joins", [False, True])
def test_requests_fail_when_no_replica_serves_for_long(joins: bool) -> None:
    """Also where a newcomer waits for a push that is not made."""
    here, weights = Elastic(0), Weights()
    with elastic([here], weights, max_attempts=9) as fleet:
        weights.push(fleet, 1)
        long, short = scaled_s(60), scaled_s(0.5)
        limits = {"generate_s": short, "restart_s": long} if joins else {"generate_s": long, "restart_s": short}
        fleet.deadlines = FleetDeadlines(health_s=scaled_s(1.0), **limits)
        here.placed, dying = joins, iter(["die"])
        here.plan = lambda call: next(dying, "ok")
        with pytest.raises(RolloutError, match="no replica was ready for"):
            fleet.submit(requests_of(3, num_tokens=30))[0].result(scaled_s(10))
        assert here.restarts == joins


def test_what_waits_for_answers_pushes_to_a_newcomer_where_all_others_are_lost() -> None:
    here, weights = Elastic(0), Weights()
    with elastic([here], weights) as fleet:
        weights.push(fleet, 1)
        here.placed, dying = True, iter(["die"])
        here.plan = lambda call: next(dying, "ok")
        pushed_in: list[int] = []

        def push() -> None:
            pushed_in.append(threading.get_ident())
            weights.push(fleet, 1)

        fleet.push = push
        fleet.deadlines = FleetDeadlines(generate_s=scaled_s(20))
        answers = fleet.generate(requests_of(6, num_tokens=30), meanwhile=fleet.push_if_stranded)
        assert_answered(requests_of(6, num_tokens=30), answers)
        assert (pushed_in, weights.connected, here.restarts) == ([threading.get_ident()], [(0,), (0,)], 1)
        counts = fleet.metrics()
        assert [counts[f"rollout/{name}"] for name in ("issued", "answered", "dropped", "left")] == [6, 6, 0, 1]


def test_a_push_after_one_that_failed_connects_those_that_live() -> None:
    replicas, weights = [Elastic(0), Elastic(1)], Weights()
    with elastic(replicas, weights) as fleet:
        weights.push(fleet, 1)
        assert_answered(requests_of(9), results(fleet.submit(requests_of(9))))
        with pytest.raises(WeightTransferError):
            weights.push(fleet, 2, breaks=True)
        replicas[0].alive = False
        weights.push(fleet, 2)
        assert weights.connected == [(0, 1), (1,)]
        assert_answered(requests_of(9), results(fleet.submit(requests_of(9))))


def test_other_threads_use_the_fleet_while_the_requests_of_a_drained_replica_fail() -> None:
    replicas, weights = [Elastic(0), Elastic(1)], Weights()
    could_use_it: list[bool] = []

    def use(_: object) -> None:
        user = threading.Thread(target=fleet.metrics, daemon=True)
        user.start()
        user.join(scaled_s(1.0))
        could_use_it.append(not user.is_alive())

    with elastic(replicas, weights, max_attempts=1) as fleet:
        weights.push(fleet, 1)
        for replica in replicas:
            replica.plan = lambda call: "silent"
        answers = fleet.submit(requests_of(2))
        for answer in answers:
            answer.add_done_callback(use)
        replicas[0].draining = True
        weights.push(fleet, 2)
        assert could_use_it == [True]
