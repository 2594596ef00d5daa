"""The fleet over replicas that fail on a script: each row is answered once, by the right weights, or the call fails."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.fleet.ledger import Ledger, LedgerError
from rlsys.fleet.replica import Answers, Replica, Work
from rlsys.protocol import DataProto
from rlsys.rollout.batch import generate_sequences
from rlsys.types import Finish, ModelRequest, ModelResponse, SamplingParams
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError
from tests.timing import scaled_s, wait_until


def quick() -> FleetDeadlines:
    return FleetDeadlines(generate_s=scaled_s(5.0), health_s=scaled_s(1.0), restart_s=scaled_s(5.0))


def requests_of(num: int, session: str = "") -> list[ModelRequest]:
    return [ModelRequest((7, i), SamplingParams(1), rid=f"r{i}", session=session) for i in range(num)]


def echo(request: ModelRequest, version: int) -> ModelResponse:
    """What a replica says: the prompt's last token, twice."""
    token = request.input_ids[-1]
    return ModelResponse(
        request.rid, request.input_ids, (token, token), (-1.0, -1.0), (-1.0, -1.0), (version,) * 2, Finish.STOP
    )


class Scripted:
    """A replica in this process whose `plan(call number)` may raise, sleep or answer wrongly."""

    def __init__(self, name: str, plan: Callable[[int], str] = lambda call: "ok") -> None:
        self.name, self.plan = name, plan
        self.version, self.alive = 0, True
        self.calls = self.restarts = 0
        self.served: list[str] = []
        self.most_at_once = self.at_once = 0

    def generate(self, work: Work, deadline_s: float) -> Answers:
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            what = self.plan(self.calls) if self.alive else "dead"
            return self._act(what, work, deadline_s)
        finally:
            self.at_once -= 1

    def _act(self, what: str, work: Work, deadline_s: float) -> Answers:
        if what == "die":
            self.alive = False
        if what in ("die", "dead"):
            raise ConnectionError(f"{self.name} is dead")
        if what == "hang":
            self.alive = False
            raise DeadlineError(self.name, "generate", deadline_s)
        if what == "raise":
            raise ValueError("a passing weakness")
        if what == "quarantine":
            raise WeightTransferError("no whole weights")
        if isinstance(work, DataProto):
            return generate_sequences(_Echo(self.version), work)
        time.sleep(0.002 if what == "slow" else 0.0)
        self.served += [request.rid for request in work]
        answers = [echo(request, self.version - 1 if what == "stale" else self.version) for request in work]
        return answers[:-1] if what == "short" else answers

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        if not self.alive:
            raise ConnectionError(f"{self.name} is dead")
        return {"version": self.version}

    def restart(self, deadline_s: float) -> None:
        self.restarts += 1
        self.alive, self.version = True, -100


class _Echo:
    def __init__(self, version: int) -> None:
        self.version = version

    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        return [echo(request, self.version) for request in requests]


@contextmanager
def fleet_of(replicas: Sequence[Replica], **options: Any) -> Iterator[RolloutFleet]:
    fleet = RolloutFleet(replicas, **{"chunk_rows": 3, "deadlines": quick(), **options})
    try:
        yield fleet
    finally:
        fleet.close()


def assert_answered(requests: Sequence[ModelRequest], answers: Sequence[ModelResponse]) -> None:
    assert [(a.rid, a.output_tokens) for a in answers] == [(r.rid, (r.input_ids[-1],) * 2) for r in requests]


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
    assert all(replica.served and replica.most_at_once == 1 for replica in replicas)


@pytest.mark.parametrize("seed", range(40))
def test_random_failures_lose_and_double_nothing(seed: int) -> None:
    """Every replica fails in every way at random calls; restarted ones get their weights before they serve."""
    rng = random.Random(seed)
    kinds = ["ok"] * 6 + ["slow", "die", "hang", "raise", "short", "stale", "quarantine"]
    plans = [[rng.choice(kinds) for _ in range(40)] for _ in range(rng.randint(1, 4))]
    replicas = [Scripted(f"replica {i}", lambda call, plan=plan: plan[call % 40]) for i, plan in enumerate(plans)]
    pushed: list[str] = []

    def push(replica: Replica) -> None:
        assert isinstance(replica, Scripted)
        if rng.random() < 0.2:
            raise WeightTransferError("the push failed")
        replica.version = 5
        pushed.append(replica.name)

    for replica in replicas:
        replica.version = 5
    options = {"max_attempts": 60, "max_restarts": 10_000, "max_in_flight": rng.randint(1, 2), "on_restart": push}
    with fleet_of(replicas, chunk_rows=rng.randint(1, 7), **options) as fleet:
        fleet.weights_pushed(5)
        for num in (rng.randint(1, 60), rng.randint(1, 60)):
            requests = requests_of(num)
            answers = fleet.generate(requests)
            assert_answered(requests, answers)
            assert {version for answer in answers for version in answer.output_versions} == {5}
        fleet.settle()
        metrics = fleet.metrics()
    assert metrics["rollout/issued"] == metrics["rollout/answered"]
    assert metrics["rollout/lost"] == metrics["rollout/pending"] == metrics["rollout/dropped"] == 0
    assert metrics["rollout/restarts"] == sum(replica.restarts for replica in replicas)


def test_a_chunk_that_always_fails_is_given_up_with_its_causes() -> None:
    replicas = [Scripted(f"replica {i}", lambda call: "raise") for i in range(2)]
    with fleet_of(replicas, max_attempts=3) as fleet:
        with pytest.raises(
            RolloutError, match=r"(?s)failed 3 times.*replica [01]: ValueError: a passing weakness"
        ) as error:
            fleet.generate(requests_of(3))
        assert {f"replica {i}" in str(error.value) for i in range(2)} == {True}
        metrics = fleet.metrics()
        assert (metrics["rollout/dropped"], metrics["rollout/pending"], metrics["rollout/lost"]) == (3, 0, 0)
        assert metrics["rollout/restarts"] == 0
        for replica in replicas:
            replica.plan = lambda call: "ok"
        assert_answered(requests_of(5), fleet.generate(requests_of(5)))


def test_replicas_that_cannot_be_restarted_end_the_call() -> None:
    replicas = [Scripted(f"replica {i}", lambda call: "die") for i in range(2)]
    with fleet_of(replicas, max_attempts=50, max_restarts=2) as fleet:
        with pytest.raises(RolloutError, match="all 2 replicas failed after 2 restarts each"):
            fleet.generate(requests_of(30))
        assert fleet.metrics()["rollout/lost"] == 0
        assert fleet.metrics()["rollout/replicas_ready"] == 0
        with pytest.raises(RolloutError, match="replicas failed"):
            fleet.generate(requests_of(1))


def test_one_replica_serves_while_another_is_restarted() -> None:
    gate, dead = threading.Event(), Scripted("dead", lambda call: "die" if call == 1 else "ok")
    well = Scripted("well")
    with fleet_of([dead, well], on_restart=lambda replica: gate.wait(scaled_s(5))) as fleet:
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
        fleet.weights_pushed(4)
        answers = fleet.generate(requests_of(30))
        assert {answer.version for answer in answers} == {4}
        assert fleet.metrics()["rollout/refused_versions"] == 1
        assert old.restarts == 0
    with fleet_of([new], max_staleness=1) as fleet:
        fleet.weights_pushed(5)
        assert len(fleet.generate(requests_of(4))) == 4
        fleet.weights_pushed(6)
        with pytest.raises(RolloutError, match="tokens of weight version 4, wanted 5 to 6"):
            fleet.generate(requests_of(4))


def test_a_session_stays_on_its_replica_until_that_one_fails() -> None:
    replicas = [Scripted(f"replica {i}") for i in range(3)]
    with fleet_of(replicas) as fleet:
        for _ in range(4):
            for name in "abcdef":
                fleet.generate(requests_of(1, session=name))
        owners = {name: r for r in replicas for name in [r.name] if r.served}
        assert sum(len(r.served) for r in replicas) == 24
        assert all(len(r.served) % 4 == 0 for r in owners.values())

        async def both() -> list[ModelResponse]:
            return await asyncio.gather(*[fleet.sample((7, 9), SamplingParams(1), session="s") for _ in range(5)])

        before = [len(r.served) for r in replicas]
        assert {response.output_tokens for response in asyncio.run(both())} == {(9, 9)}
        gained = [len(r.served) - n for r, n in zip(replicas, before, strict=True)]
        assert sorted(gained) == [0, 0, 5]
        owner = replicas[gained.index(5)]
        owner.plan = lambda call: "raise"
        asyncio.run(both())
        assert sum(len(r.served) for r in replicas if r is not owner) >= 5


def test_least_loaded_first() -> None:
    release = threading.Event()

    class Waits(Scripted):
        def generate(self, work: Work, deadline_s: float) -> Answers:
            self.at_once += 1
            release.wait(scaled_s(10))
            return super().generate(work, deadline_s)

    replicas = [Waits("a"), Waits("b")]
    with fleet_of(replicas, max_in_flight=3, chunk_rows=1) as fleet:
        thread = threading.Thread(target=fleet.generate, args=(requests_of(4),))
        thread.start()
        wait_until(lambda: sum(r.at_once for r in replicas) >= 4, 5)
        assert [r.at_once for r in replicas] == [2, 2]
        release.set()
        thread.join(scaled_s(5))


def test_health_check_restarts_the_dead() -> None:
    replicas = [Scripted("a"), Scripted("b")]
    replicas[1].alive = False
    with fleet_of(replicas) as fleet:
        assert fleet.check_health() == {"a": {"version": 0}, "b": {"error": "b is dead"}}
        assert replicas[1].restarts == 1
        assert fleet.metrics()["rollout/replicas_ready"] == 2


def test_batches_are_split_without_a_trace() -> None:
    prompts = torch.tensor([[0, 5], [6, 7], [0, 8], [9, 3], [0, 4]])
    meta = {"response_length": 3, "pad_token_id": 0, "seed": 1, "global_steps": 2}
    batch = DataProto.from_dict({"prompts": prompts, "attention_mask": (prompts > 0).long()}, meta_info=meta)
    with fleet_of([Scripted("a"), Scripted("b", lambda call: "short" if call == 1 else "ok")], chunk_rows=2) as fleet:
        out = fleet.generate_sequences(batch)
        fleet.weights_pushed(1)
        with pytest.raises(RolloutError, match="tokens of weight version 0, wanted 1 to 1"):
            fleet.generate_sequences(batch)
    whole = generate_sequences(_Echo(0), batch)
    for name, tensor in whole.batch.items():
        assert torch.equal(out.batch[name], tensor), name
    assert out.batch["responses"][:, 0].tolist() == [5, 7, 8, 3, 4]
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
    assert wait_until(lambda: replica.at_once)
    fleet.close()
    thread.join(scaled_s(5))
    stuck.set()
    assert "closed" in str(caught[0])
    assert fleet.ledger.counts() == {"issued": 3, "answered": 0, "dropped": 3, "pending": 0, "lost": 0}


@given(st.lists(st.tuples(st.sampled_from(["issue", "answer", "drop"]), st.integers(0, 12)), max_size=30))
def test_the_ledger_balances(events: list[tuple[str, int]]) -> None:
    ledger, open_rows = Ledger(), set()
    for what, number in events:
        if what == "issue":
            open_rows |= set(ledger.issue(number))
        elif number in open_rows:
            ledger.answer([number]) if what == "answer" else ledger.drop([number], "reason")
            open_rows.remove(number)
        else:
            with pytest.raises(LedgerError):
                ledger.answer([number]) if what == "answer" else ledger.drop([number], "reason")
        ledger.check()
    assert ledger.pending == open_rows
    with pytest.raises(LedgerError):
        ledger.answer([ledger.issue(1)[0]] * 2)


class ProcessReplica:
    """A replica in a process of its own, spoken to through a pipe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0
        self._start()

    def _start(self) -> None:
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def _ask(self, message: Any, deadline_s: float) -> Any:
        """The answer to this message; answers to earlier ones that came too late are passed over."""
        self.asked += 1
        self.pipe.send((self.asked, message))
        end_s = time.monotonic() + deadline_s
        while self.pipe.poll(max(0.0, end_s - time.monotonic())):
            number, answer = self.pipe.recv()
            if number == self.asked:
                return answer
        raise DeadlineError(self.name, "generate", deadline_s)

    def generate(self, work: Work, deadline_s: float) -> Answers:
        return self._ask(list(work), deadline_s)

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self._ask("health", deadline_s)

    def restart(self, deadline_s: float) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    version = 0
    while True:
        number, message = pipe.recv()
        if message == "health":
            pipe.send((number, {"version": version}))
        elif isinstance(message, int):
            version = message
            pipe.send((number, version))
        else:
            time.sleep(0.02)
            pipe.send((number, [echo(request, version) for request in message]))


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_real_processes_are_killed_and_stopped(deed: signal.Signals) -> None:
    replicas = [ProcessReplica(f"process {i}") for i in range(3)]
    victims = random.Random(0)

    def harm() -> None:
        for _ in range(4):
            time.sleep(0.12)
            pid = victims.choice(replicas).process.pid
            assert pid is not None
            os.kill(pid, deed)

    def push(replica: Replica) -> None:
        assert isinstance(replica, ProcessReplica)
        replica._ask(9, scaled_s(2.0))

    deadlines = FleetDeadlines(generate_s=scaled_s(0.7), health_s=scaled_s(0.3), restart_s=scaled_s(5.0))
    try:
        for replica in replicas:
            push(replica)
        with fleet_of(replicas, deadlines=deadlines, on_restart=push, max_attempts=8, max_restarts=9) as fleet:
            fleet.weights_pushed(9)
            thread = threading.Thread(target=harm)
            thread.start()
            while thread.is_alive():
                requests = requests_of(30)
                assert_answered(requests, fleet.generate(requests))
            assert wait_until(lambda: fleet.metrics()["rollout/restarts"], 5)
            assert fleet.metrics()["rollout/lost"] == 0
    finally:
        for replica in replicas:
            replica.close()
