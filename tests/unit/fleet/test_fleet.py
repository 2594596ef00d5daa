"""The fleet over replicas that fail on a script: each request is answered once, by the right weights, or fails."""

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.config.schema.trainer import GradingDeadlinesConfig
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.fleet.group import group_fleet
from rlsys.fleet.requests import Replica
from rlsys.protocol import DataProto
from rlsys.rollout.batch import generate_sequences
from rlsys.rollout.partial import PartialResponse
from rlsys.types import Finish, ModelRequest, ModelResponse, ResponseDelta, SamplingParams
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError
from tests.timing import scaled_s, wait_until
from tests.unit.fleet.engine_process import EngineProcess

PACE = 3


def quick() -> FleetDeadlines:
    limit_s = scaled_s(5.0)
    return FleetDeadlines(generate_s=limit_s, exchange_s=limit_s, health_s=scaled_s(1.0), restart_s=limit_s)


def requests_of(num: int, session: str = "", *, num_tokens: int = 2) -> list[ModelRequest]:
    return [ModelRequest((7, i), SamplingParams(num_tokens), rid=f"r{i}", session=session) for i in range(num)]


def drawn(request: ModelRequest, num: int) -> tuple[int, ...]:
    """The tokens of these fake engines: a function of the prompt's first two tokens and of the absolute position."""
    first = len(request.input_ids)
    return tuple((31 * request.input_ids[0] + 7 * request.input_ids[1] + at) % 50 for at in range(first, first + num))


class Fake:
    """An engine that draws PACE tokens for each request between two exchanges."""

    def __init__(self) -> None:
        self.version = 0
        self.open: dict[str, ModelRequest] = {}
        self.num_drawn = 0

    def exchange(
        self, new: Sequence[ModelRequest] = (), *, wait_s: float = 0.0, cancel: Collection[str] = ()
    ) -> list[ResponseDelta]:
        self.take_in(new, cancel)
        return [self.draw(rid, self.version) for rid in list(self.open)]

    def take_in(self, new: Sequence[ModelRequest], cancel: Collection[str]) -> None:
        for rid in cancel:
            self.open.pop(rid, None)
        for request in new:
            assert request.rid not in self.open
            self.open[request.rid] = request

    def draw(self, rid: str, version: int, finish: Finish | None = None) -> ResponseDelta:
        request = self.open.pop(rid)
        left = request.gconfig.max_new_tokens
        num = min(PACE, left)
        tokens = drawn(request, num)
        self.num_drawn += num
        finish = Finish.LENGTH if num == left else finish
        if finish is None:
            ids, params = request.input_ids + tokens, replace(request.gconfig, max_new_tokens=left - num)
            self.open[rid] = replace(request, input_ids=ids, gconfig=params)
        return ResponseDelta(rid, tokens, (-1.0,) * num, (-2.0,) * num, (version,) * num, finish)


class Scripted(Fake):
    """A replica in this process whose `plan(exchange number)` may raise, sleep or answer wrongly."""

    def __init__(self, name: str, plan: Callable[[int], str] = lambda call: "ok") -> None:
        super().__init__()
        self.name, self.plan, self.alive = name, plan, True
        self.calls = self.restarts = 0
        self.served: list[str] = []
        self.batches: list[list[str]] = []

    def exchange(  # type: ignore[override]
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> list[ResponseDelta]:
        self.calls += 1
        what = self.plan(self.calls) if self.alive else "dead"
        if what == "die":
            self.alive = False
        if what in ("die", "dead"):
            raise ConnectionError(f"{self.name} is dead")
        if what == "hang":
            self.alive = False
            raise DeadlineError(self.name, "exchange", deadline_s)
        if what == "raise":
            raise ValueError("a passing weakness")
        if what == "quarantine":
            raise WeightTransferError("no whole weights")
        time.sleep(0.002 if what == "slow" else 0.0)
        self.served += [request.rid.partition("#")[0] for request in new]
        self.batches += [[request.rid.partition("#")[0] for request in new]] if new else []
        if what == "silent":
            self.take_in(new, cancel)
            time.sleep(0.01)
            return []
        if what == "refuse":
            return [ResponseDelta(request.rid, error="too long", refused=True) for request in new]
        if what == "abort":
            self.take_in(new, cancel)
            return [self.draw(rid, self.version, Finish.ABORT) for rid in list(self.open)]
        deltas = super().exchange(new, cancel=cancel)
        if what == "lost":
            raise TimeoutError("the answer was lost")
        if what == "stale":
            return [replace(delta, versions=(self.version - 1,) * len(delta.tokens)) for delta in deltas]
        if what == "error" and deltas:
            self.open.pop(deltas[0].rid, None)
            deltas[0] = ResponseDelta(deltas[0].rid, error="not finite")
        return deltas

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        if not self.alive:
            raise ConnectionError(f"{self.name} is dead")
        return {"version": self.version}

    def restart(self, deadline_s: float) -> None:
        self.restarts += 1
        self.open.clear()
        self.alive, self.version = True, -100


@contextmanager
def fleet_of(replicas: Sequence[Replica], **options: Any) -> Iterator[RolloutFleet]:
    fleet = RolloutFleet(replicas, **{"chunk_rows": 3, "deadlines": quick(), **options})
    try:
        yield fleet
    finally:
        fleet.close()


def pushed(fleet: RolloutFleet, version: int) -> None:
    with fleet.pushing(version):
        pass


def assert_answered(requests: Sequence[ModelRequest], answers: Sequence[ModelResponse]) -> None:
    expected = [(r.rid, drawn(r, r.gconfig.max_new_tokens)) for r in requests]
    assert [(a.rid, a.output_tokens) for a in answers] == expected
    for answer in answers:
        num = len(answer.output_tokens)
        assert answer.stop_reason is Finish.LENGTH
        assert (answer.output_logprobs, answer.sampled_logprobs) == ((-1.0,) * num, (-2.0,) * num)


def results(answers: Sequence[Future[ModelResponse]]) -> list[ModelResponse]:
    return [answer.result(scaled_s(20)) for answer in answers]


def test_the_work_is_shared_and_answers_keep_their_order() -> None:
    all_serve = threading.Barrier(3)
    plan = lambda call: str(all_serve.wait(scaled_s(10)) if call == 1 else "") and "ok"  # noqa: E731
    replicas = [Scripted(f"replica {i}", plan) for i in range(3)]
    with fleet_of(replicas) as fleet:
        requests = requests_of(100)
        assert_answered(requests, fleet.generate(requests))
        assert fleet.generate([]) == []
        assert fleet.metrics()["rollout/answered"] == fleet.metrics()["rollout/issued"] == 100
    assert sorted(rid for r in replicas for rid in r.served) == sorted(r.rid for r in requests)
    assert sorted(batch for r in replicas for batch in r.batches) == sorted(
        [r.rid for r in requests[at : at + 3]] for at in range(0, 100, 3)
    )


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_random_failures_lose_and_double_nothing(seed: int, together: bool) -> None:
    """Every replica fails in every way at random exchanges; restarted ones get their weights before they serve."""
    rng = random.Random(seed)
    kinds = ["ok"] * 14 + ["slow", "die", "hang", "raise", "lost", "error", "abort", "stale", "quarantine"]
    plans = [[rng.choice(kinds) for _ in range(80)] for _ in range(rng.randint(1, 4))]
    replicas = [Scripted(f"replica {i}", lambda call, plan=plan: plan[call % 80]) for i, plan in enumerate(plans)]

    def push(replica: Replica) -> None:
        assert isinstance(replica, Scripted)
        if rng.random() < 0.2:
            raise ConnectionError("the connection was lost")
        replica.version = 5

    for replica in replicas:
        replica.version = 5
    options = {"max_attempts": 200, "max_restarts": 10_000, "on_restart": push}
    with fleet_of(replicas, chunk_rows=rng.randint(1, 7), **options) as fleet:
        pushed(fleet, 5)
        for num in (rng.randint(1, 40), rng.randint(1, 40)):
            requests = [replace(one, gconfig=SamplingParams(rng.choice([1, 2, 7, 12]))) for one in requests_of(num)]
            answers = results(fleet.submit(requests, together=together))
            assert_answered(requests, answers)
            assert {version for answer in answers for version in answer.output_versions} == {5}
        fleet.settle()
        metrics = fleet.metrics()
    assert metrics["rollout/issued"] == metrics["rollout/answered"]
    assert metrics["rollout/pending"] == metrics["rollout/dropped"] == 0
    assert metrics["rollout/restarts"] == sum(replica.restarts for replica in replicas)


def test_a_lost_replica_costs_the_tokens_of_one_exchange() -> None:
    dead, well = Scripted("dead", lambda call: "die" if call == 50 else "ok"), Scripted("well")
    requests = requests_of(6, num_tokens=300)
    with fleet_of([dead, well]) as fleet:
        assert_answered(requests, results(fleet.submit(requests)))
    assert dead.num_drawn == 3 * 49 * PACE
    assert dead.num_drawn + well.num_drawn == 6 * 300


def test_a_fixed_batch_is_repeated_alone_and_as_a_whole() -> None:
    """What one batch holds never depends on failures, so neither do the bits of its answers."""
    replicas = [Scripted(f"replica {i}", lambda call: "die" if call == 3 else "ok") for i in range(2)]
    requests = [replace(one, gconfig=SamplingParams(2 + 9 * (i % 2))) for i, one in enumerate(requests_of(12))]
    with fleet_of(replicas) as fleet:
        assert_answered(requests, fleet.generate(requests))
        assert fleet.metrics()["rollout/retries"] == 2
    batches = Counter(tuple(batch) for replica in replicas for batch in replica.batches)
    assert sorted(batches.values()) == [1, 1, 2, 2]
    assert set(batches) == {tuple(r.rid for r in requests[at : at + 3]) for at in range(0, 12, 3)}


def test_a_request_that_always_fails_is_given_up_with_its_causes() -> None:
    replicas = [Scripted(f"replica {i}", lambda call: "raise") for i in range(2)]
    with fleet_of(replicas, max_attempts=3) as fleet:
        with pytest.raises(
            RolloutError, match=r"(?s)failed 3 times.*replica [01]: ValueError: a passing weakness"
        ) as error:
            fleet.generate(requests_of(3))
        assert {f"replica {i}" in str(error.value) for i in range(2)} == {True}
        metrics = fleet.metrics()
        assert (metrics["rollout/dropped"], metrics["rollout/pending"]) == (3, 0)
        assert metrics["rollout/restarts"] == 0
        for replica in replicas:
            replica.plan = lambda call: "ok"
        assert_answered(requests_of(5), fleet.generate(requests_of(5)))


def test_a_refused_request_fails_alone_and_at_once() -> None:
    replica = Scripted("a", lambda call: "refuse" if call == 1 else "ok")
    with fleet_of([replica]) as fleet:
        [bad] = fleet.submit([ModelRequest((7, 7), SamplingParams(2), rid="culprit")])
        with pytest.raises(ValueError, match=r"culprit.*too long"):
            bad.result(scaled_s(10))
        assert_answered(requests_of(2), fleet.generate(requests_of(2)))
        assert (fleet.metrics()["rollout/dropped"], fleet.metrics()["rollout/failures"]) == (1, 0)


def test_a_silent_replica_is_taken_out_by_its_deadline() -> None:
    silent, well = Scripted("silent", lambda call: "silent"), Scripted("well")
    deadlines = replace(quick(), generate_s=scaled_s(0.2))
    with fleet_of([silent, well], deadlines=deadlines) as fleet:
        requests = requests_of(4)
        assert_answered(requests, results(fleet.submit(requests)))
        assert fleet.metrics()["rollout/failures"] >= 1
    mute = Scripted("mute", lambda call: "silent")
    with (
        fleet_of([mute], deadlines=deadlines, max_attempts=1) as fleet,
        pytest.raises(RolloutError, match=r"mute: DeadlineError: .*'generate'"),
    ):
        fleet.generate(requests_of(2))


def test_replicas_that_cannot_be_restarted_end_the_call() -> None:
    replicas = [Scripted(f"replica {i}", lambda call: "die") for i in range(2)]
    with fleet_of(replicas, max_attempts=50, max_restarts=2) as fleet:
        with pytest.raises(RolloutError, match="all 2 rollout replicas failed after 2 restarts each"):
            fleet.generate(requests_of(30))
        assert fleet.metrics()["rollout/pending"] == 0
        assert fleet.metrics()["rollout/replicas_ready"] == 0
        with pytest.raises(RolloutError, match="replicas failed"):
            fleet.generate(requests_of(1))


@pytest.mark.parametrize("while_idle", [False, True])
def test_a_replica_that_was_given_up_is_lost_and_not_idle(while_idle: bool) -> None:
    dead, well = Scripted("dead", lambda call: "ok" if while_idle else "die"), Scripted("well", lambda call: "slow")
    with fleet_of([dead, well], max_restarts=0) as fleet:
        if while_idle:
            dead.alive = False
            fleet.check_health()
        answers = fleet.submit(requests_of(20, num_tokens=1_000_000))
        assert wait_until(lambda: fleet.metrics()["rollout/replicas_ready"] == 1 and len(well.open) == 20)
        before_s = fleet.idle_s()
        time.sleep(0.2)
        assert fleet.idle_s() - before_s < 0.1
        for answer in answers:
            answer.cancel()


def test_one_replica_serves_while_another_is_restarted() -> None:
    gate, dead = threading.Event(), Scripted("dead", lambda call: "die" if call == 1 else "ok")
    well = Scripted("well")
    with fleet_of([dead, well], on_restart=lambda replica: gate.wait(scaled_s(60))) as fleet:
        requests = requests_of(50)
        assert_answered(requests, fleet.generate(requests))
        assert not gate.is_set()
        gate.set()
    assert len(well.served) == 50


def test_wrong_versions_are_refused_and_healed() -> None:
    old = Scripted("old")
    new = Scripted("new", lambda call: str(wait_until(lambda: old.calls)) and "ok")
    old.version, new.version = 3, 4

    def push(replica: Replica) -> None:
        assert replica is old
        old.version = 4

    with fleet_of([old, new], on_restart=push) as fleet:
        pushed(fleet, 4)
        answers = fleet.generate(requests_of(30))
        assert {answer.version for answer in answers} == {4}
        assert fleet.metrics()["rollout/refused_versions"] == 1
        assert old.restarts == 0
    with fleet_of([new]) as fleet:
        pushed(fleet, 6)
        with pytest.raises(RolloutError, match="tokens of weight versions 4 to 4, wanted 6 to 6"):
            fleet.generate(requests_of(4))


@pytest.mark.parametrize("on_update", ["kept", "given back"])
def test_answers_survive_a_push(on_update: str) -> None:
    is_pushed, gives_back = threading.Event(), threading.Event()

    def plan(call: int) -> str:
        if call > 20 and not is_pushed.is_set():
            return "silent"
        return "abort" if gives_back.is_set() else "ok"

    replicas = [Scripted(f"replica {i}", plan) for i in range(2)]
    requests = requests_of(4, num_tokens=2000)
    with fleet_of(replicas, deadlines=replace(quick(), generate_s=scaled_s(60))) as fleet:
        pushed(fleet, 0)
        answers = fleet.submit(requests)
        assert wait_until(lambda: all(replica.calls > 20 for replica in replicas))
        with fleet.pushing(1):
            calls = [replica.calls for replica in replicas]
            time.sleep(0.05)
            assert [replica.calls for replica in replicas] == calls
            for replica in replicas:
                replica.version = 1
        if on_update == "given back":
            gives_back.set()
        is_pushed.set()
        if on_update == "given back":
            assert wait_until(lambda: fleet.metrics()["rollout/continued"] >= 4)
            gives_back.clear()
        made = results(answers)
        assert_answered(requests, made)
        for answer in made:
            num_old = answer.output_versions.count(0)
            assert answer.output_versions == (0,) * num_old + (1,) * (2000 - num_old)
            assert num_old == 20 * PACE
        assert fleet.metrics()["rollout/failures"] == 0


def test_a_push_that_fails_leaves_the_fleet_serving_the_old_version() -> None:
    with fleet_of([Scripted("a")]) as fleet:
        pushed(fleet, 0)
        with pytest.raises(WeightTransferError), fleet.pushing(1):
            raise WeightTransferError("half way")
        assert fleet.version == 0
        assert_answered(requests_of(3), fleet.generate(requests_of(3)))


def test_a_replica_that_is_lost_in_a_push_is_restarted_for_the_next_one() -> None:
    lost, other = Scripted("lost"), Scripted("other")

    def not_there(replica: Replica) -> None:
        raise WeightTransferError("no version is exported: push again")

    with fleet_of([lost, other], on_restart=not_there) as fleet:
        pushed(fleet, 0)
        assert_answered(requests_of(6), fleet.generate(requests_of(6)))
        lost.alive = False
        with pytest.raises(ConnectionError), fleet.pushing(1):
            raise ConnectionError("lost is dead")
        with fleet.pushing(1):
            assert (lost.restarts, other.restarts) == (1, 0)
            lost.version = other.version = 1
        assert_answered(requests_of(6), fleet.generate(requests_of(6)))
        counts = fleet.metrics()
        assert [counts[f"rollout/{name}"] for name in ("restarts", "replicas_ready")] == [1, 2]


@pytest.mark.parametrize("alone", [False, True])
def test_a_replica_whose_weights_are_not_there_between_pushes_serves_after_the_next_one(alone: bool) -> None:
    lost, other = Scripted("lost"), Scripted("other")
    replicas = [lost] if alone else [lost, other]

    def not_there(replica: Replica) -> None:
        raise WeightTransferError("this executor cannot restore a rank: push again")

    def push(version: int) -> None:
        with fleet.pushing(version):
            lost.version = other.version = version

    with fleet_of(replicas, on_restart=not_there) as fleet:
        push(0)
        lost.alive, fleet.push = False, lambda: push(0)
        requests = requests_of(12, num_tokens=30)
        assert_answered(requests, fleet.generate(requests, meanwhile=fleet.push_if_stranded))
        assert fleet.metrics()["rollout/replicas_ready"] == 1
        push(1)
        assert_answered(requests, fleet.generate(requests))
        counts = fleet.metrics()
        ready = [counts[f"rollout/{name}"] for name in ("restarts", "replicas_ready")]
        assert ready == [1, len(replicas)], "it is started once, since no restart brings the weights"


def test_requests_fail_where_no_push_brings_weights_to_the_only_replica() -> None:
    lost = Scripted("lost")

    def not_there(replica: Replica) -> None:
        raise WeightTransferError("this executor cannot restore a rank: push again")

    limits = replace(quick(), generate_s=scaled_s(0.5))
    with fleet_of([lost], on_restart=not_there, deadlines=limits, max_restarts=1) as fleet:
        pushed(fleet, 0)
        lost.alive = False
        with pytest.raises(RolloutError, match="no replica was ready for"):
            fleet.generate(requests_of(3))


def test_restarts_are_counted_between_two_pushes() -> None:
    replica = Scripted("frail")

    def bring(_: Replica) -> None:
        replica.version = fleet.version or 0

    with fleet_of([replica], max_restarts=1, on_restart=bring) as fleet:
        for version in range(3):
            pushed(fleet, version)
            replica.alive, replica.version = False, version
            assert_answered(requests_of(3), fleet.generate(requests_of(3)))
        assert fleet.metrics()["rollout/restarts"] == 3


def test_a_cancelled_request_is_dropped_everywhere() -> None:
    replica = Scripted("a", lambda call: "ok" if call < 4 else "silent")
    with fleet_of([replica], deadlines=replace(quick(), generate_s=scaled_s(60))) as fleet:
        keep, drop = fleet.submit(requests_of(2, num_tokens=100_000))
        assert wait_until(lambda: replica.calls > 3)
        assert drop.cancel()
        assert wait_until(lambda: len(replica.open) == 1)
        assert not keep.done()
        with pytest.raises(CancelledError):
            drop.result()
        counts = fleet.metrics()
        assert (counts["rollout/dropped"], counts["rollout/pending"]) == (1, 1)

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(fleet.sample(ModelRequest((7, 9), SamplingParams(100_000))), 0.1)

        asyncio.run(give_up())
        assert wait_until(lambda: len(replica.open) == 1)


def test_unfinished_requests_are_continued_by_another_fleet() -> None:
    """What a checkpoint keeps."""
    requests = requests_of(5, num_tokens=2000)
    plan = lambda call: "ok" if call < 5 else "silent"  # noqa: E731
    deadlines = replace(quick(), generate_s=scaled_s(60))
    with fleet_of([Scripted("a", plan), Scripted("b", plan)], deadlines=deadlines) as fleet:
        fleet.submit(requests)
        assert wait_until(lambda: all(len(one.tokens) > 10 for one in fleet.unfinished()))
        kept = fleet.unfinished()
    fresh = Scripted("c")
    with fleet_of([fresh]) as fleet:
        assert_answered(requests, results(fleet.submit(kept)))
    assert fresh.num_drawn == sum(one.room for one in kept) == 5 * (2000 - 4 * PACE)
    response = ModelResponse("r0", (7, 0), (1, 2), (-1.0, -1.0), (-1.0, -1.0), (3, 3), Finish.LENGTH)
    again = PartialResponse.of(requests[0], response)
    assert (again.tokens, again.versions, again.room, again.finish) == ([1, 2], [3, 3], 1998, None)


def test_what_waits_for_an_answer_may_call_the_fleet() -> None:
    """Callbacks run outside of the fleet's lock: one that takes another lock cannot block the fleet."""
    mine, done = threading.Lock(), list[Future[ModelResponse]]()
    with fleet_of([Scripted("a"), Scripted("b")]) as fleet:

        def next_turn(answer: Future[ModelResponse]) -> None:
            with mine:
                done.append(answer)
                if len(done) < 40:
                    fleet.submit(requests_of(1))[0].add_done_callback(next_turn)

        for _ in range(4):
            with mine:
                [first] = fleet.submit(requests_of(1))
            first.add_done_callback(next_turn)
        assert wait_until(lambda: len(done) >= 40)


def test_a_session_stays_on_its_replica_until_that_one_fails() -> None:
    replicas = [Scripted(f"replica {i}") for i in range(3)]
    with fleet_of(replicas) as fleet:
        for _ in range(4):
            wait([fleet.submit(requests_of(1, session=name))[0] for name in "abcdef"])
        assert sum(len(r.served) for r in replicas) == 24
        assert all(len(r.served) % 4 == 0 for r in replicas)

        async def both() -> list[ModelResponse]:
            requests = [ModelRequest((7, 9), SamplingParams(1), session="s") for _ in range(5)]
            return await asyncio.gather(*map(fleet.sample, requests))

        before = [len(r.served) for r in replicas]
        expected = drawn(ModelRequest((7, 9), SamplingParams(1)), 1)
        assert {response.output_tokens for response in asyncio.run(both())} == {expected}
        gained = [len(r.served) - n for r, n in zip(replicas, before, strict=True)]
        assert sorted(gained) == [0, 0, 5]
        owner = replicas[gained.index(5)]
        owner.plan = lambda call: "raise"
        asyncio.run(both())
        assert sum(len(r.served) for r in replicas if r is not owner) >= 5


def test_least_loaded_first_and_no_more_than_there_is_room_for() -> None:
    release = threading.Event()
    plan = lambda call: "ok" if release.is_set() else str(time.sleep(0.01)) and "silent"  # noqa: E731
    replicas = [Scripted(name, plan) for name in "ab"]
    with fleet_of(replicas, max_in_flight=4) as fleet:
        answers = fleet.submit(requests_of(10))
        assert wait_until(lambda: [len(r.open) for r in replicas] == [4, 4])
        release.set()
        assert_answered(requests_of(10), results(answers))


def test_health_check_restarts_the_dead() -> None:
    replicas = [Scripted("a"), Scripted("b")]
    replicas[1].alive = False
    with fleet_of(replicas) as fleet:
        fleet.check_health()
        assert [replica.restarts for replica in replicas] == [0, 1]
        assert fleet.metrics()["rollout/replicas_ready"] == 2
        pushed(fleet, 1)
        replicas[0].alive = False
        pushed(fleet, 2)
        assert replicas[0].restarts == 1


def test_batches_are_split_without_a_trace() -> None:
    prompts = torch.tensor([[0, 5, 1], [6, 7, 2], [0, 8, 3], [9, 3, 4], [0, 4, 5]])
    meta = {"response_length": 3, "pad_token_id": 0, "seed": 1, "global_steps": 2}
    batch = DataProto.from_dict({"prompts": prompts, "attention_mask": (prompts > 0).long()}, meta_info=meta)
    with fleet_of([Scripted("a"), Scripted("b", lambda call: "raise" if call == 1 else "ok")], chunk_rows=2) as fleet:
        out = fleet.generate_sequences(batch)
    whole = generate_sequences(Fake(), batch)
    for name, tensor in whole.batch.items():
        assert torch.equal(out.batch[name], tensor), name
    assert out.batch["response_mask"].sum() == 15
    assert out.meta_info == whole.meta_info


def test_closing_releases_who_waits() -> None:
    stuck = threading.Event()
    replica = Scripted("a", lambda call: str(stuck.wait(scaled_s(10)) and "ok"))
    fleet = RolloutFleet([replica], chunk_rows=1, deadlines=quick())
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            fleet.generate(requests_of(3))
        except RolloutError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_until(lambda: replica.calls)
    fleet.close()
    thread.join(scaled_s(5))
    stuck.set()
    assert "closed" in str(caught[0])
    counts = fleet.metrics()
    assert [counts[f"rollout/{name}"] for name in ("issued", "answered", "dropped", "pending")] == [3, 0, 3, 0]


class InProcess(Fake):
    """An engine of 5 ms a step, for a process of its own."""

    def exchange(
        self, new: Sequence[ModelRequest] = (), *, wait_s: float = 0.0, cancel: Collection[str] = ()
    ) -> list[ResponseDelta]:
        time.sleep(0.005)
        return super().exchange(new, cancel=cancel)

    def health(self) -> Mapping[str, Any]:
        return {"version": self.version}

    def begin_update(self) -> None: ...

    def finish_update(self, version: int) -> None:
        self.version = version


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_real_processes_are_killed_and_stopped(deed: signal.Signals, together: bool) -> None:
    replicas = [EngineProcess(f"process {i}", InProcess) for i in range(3)]
    victims = random.Random(0)

    def harm() -> None:
        for _ in range(4):
            time.sleep(0.12)
            victims.choice(replicas).send(deed)

    def push(replica: Replica) -> None:
        assert isinstance(replica, EngineProcess)
        replica.update(9, 2.0)

    limits = {"exchange_s": scaled_s(0.7), "health_s": scaled_s(0.3), "restart_s": scaled_s(5.0)}
    deadlines = FleetDeadlines(generate_s=scaled_s(5.0), **limits)
    try:
        for replica in replicas:
            push(replica)
        with fleet_of(replicas, deadlines=deadlines, on_restart=push, max_attempts=8, max_restarts=9) as fleet:
            pushed(fleet, 9)
            thread = threading.Thread(target=harm)
            thread.start()
            while thread.is_alive():
                requests = requests_of(30, num_tokens=40)
                assert_answered(requests, results(fleet.submit(requests, together=together)))
            assert wait_until(lambda: fleet.metrics()["rollout/restarts"], 5)
            assert fleet.metrics()["rollout/pending"] == 0
    finally:
        for replica in replicas:
            replica.close()


class Ranks:
    """Four ranks of an engine with two copies of the attention, of which each draws every second request."""

    world_size = 4

    def __init__(self) -> None:
        self.engines = [Fake() for _ in range(4)]

    def execute_rank_async(
        self, rank: int, method: str, new: Sequence[ModelRequest], wait_s: float, cancel: Collection[str]
    ) -> Any:
        deltas = self.engines[rank].exchange(new[rank // 2 :: 2], cancel=cancel)
        return type("Result", (), {"get": lambda self, deadline_s: deltas})()


def test_every_copy_of_the_attention_answers_for_its_requests() -> None:
    rollout = GenerationConfig(tensor_model_parallel_size=2, data_parallel_size=2, expert_parallel_size=4)
    fleet = group_fleet(Ranks(), rollout, GradingDeadlinesConfig(), num_rows=5, restartable=False)
    requests = requests_of(5, num_tokens=7)
    assert [answer.output_tokens for answer in fleet.generate(requests)] == [drawn(one, 7) for one in requests]
    fleet.close()
