"""A fleet of real engines in processes of their own that are killed, stopped or left half updated while they decode."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.fleet.replica import Replica
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.partial import complete
from rlsys.types import ModelRequest, ModelResponse, ResponseDelta, SamplingParams
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError
from tests.contracts.rollout_engine import requests_of, tiny_model
from tests.timing import scaled_s, wait_until

PARAMS = SamplingParams(250, ignore_eos=True, seed=100)
"""A seed of which no token is at a boundary that the rounding of another batch would cross."""


def engine_of() -> HFRollout:
    return HFRollout(tiny_model(), GenerationConfig(seed=11))


class EngineProcess:
    """A replica whose engine is in a forked process; calls are (method, arguments, named arguments) through a pipe."""

    def __init__(self, name: str) -> None:
        self.name, self.asked, self.lock = name, 0, threading.Lock()
        self._start()

    def _start(self) -> None:
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, deadline_s: float, method: str, *args: Any, **named: Any) -> Any:
        with self.lock:
            self.asked += 1
            self.pipe.send((self.asked, method, args, named))
            end_s = time.monotonic() + deadline_s
            while self.pipe.poll(max(0.0, end_s - time.monotonic())):
                number, answer = self.pipe.recv()
                if number == self.asked:
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
        raise DeadlineError(self.name, method, deadline_s)

    def exchange(
        self, new: Sequence[ModelRequest], *, cancel: Collection[str], wait_s: float, deadline_s: float
    ) -> list[ResponseDelta]:
        return self.ask(deadline_s, "exchange", list(new), cancel=set(cancel), wait_s=wait_s)

    def health(self, deadline_s: float) -> Mapping[str, Any]:
        return self.ask(deadline_s, "health")

    def restart(self, deadline_s: float) -> None:
        self.close()
        self._start()

    def update(self, version: int) -> None:
        self.ask(scaled_s(20), "begin_update")
        self.ask(scaled_s(20), "finish_update", version)

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    engine = engine_of()
    while True:
        number, method, args, named = pipe.recv()
        try:
            answer = getattr(engine, method)(*args, **named)
        except (RolloutError, WeightTransferError) as error:
            answer = error
        pipe.send((number, answer))


@pytest.fixture(scope="module")
def whole() -> list[ModelResponse]:
    """What one engine answers without interruption."""
    engine = engine_of()
    answers = complete(engine, wanted())
    engine.close()
    return answers


def wanted() -> list[ModelRequest]:
    return requests_of(8, PARAMS)


@pytest.fixture
def replicas() -> Iterator[list[EngineProcess]]:
    made = [EngineProcess(f"process {number}") for number in range(2)]
    yield made
    for replica in made:
        replica.close()


def bring(replica: Replica) -> None:
    assert isinstance(replica, EngineProcess)
    replica.update(3)


def kill(replicas: list[EngineProcess], fleet: RolloutFleet) -> None:
    replicas[0].send(signal.SIGKILL)


def stop(replicas: list[EngineProcess], fleet: RolloutFleet) -> None:
    replicas[1].send(signal.SIGSTOP)


def push(replicas: list[EngineProcess], fleet: RolloutFleet) -> None:
    with fleet.pushing(4):
        for replica in replicas:
            replica.update(4)


def push_half_way(replicas: list[EngineProcess], fleet: RolloutFleet) -> None:
    """One replica got the new weights, the other stays quarantined: both get the old ones back."""

    def transfer() -> None:
        with fleet.pushing(4):
            replicas[0].update(4)
            replicas[1].ask(scaled_s(20), "begin_update")
            raise WeightTransferError("half way")

    with pytest.raises(WeightTransferError, match="half way"):
        transfer()


@pytest.mark.parametrize(
    ("deed", "versions", "failures"),
    [(kill, {3}, 1), (stop, {3}, 1), (push, {3, 4}, 0), (push_half_way, {3}, 2)],
)
def test_answers_survive_what_happens_to_their_engines(
    replicas: list[EngineProcess],
    whole: list[ModelResponse],
    deed: Callable[[list[EngineProcess], RolloutFleet], None],
    versions: set[int],
    failures: int,
) -> None:
    deadlines = FleetDeadlines(
        generate_s=scaled_s(20), exchange_s=scaled_s(2), health_s=scaled_s(1), restart_s=scaled_s(20)
    )
    fleet = RolloutFleet(replicas, chunk_rows=4, deadlines=deadlines, on_restart=bring)
    try:
        with fleet.pushing(3):
            for replica in replicas:
                replica.update(3)
        answers = fleet.submit(wanted())
        assert wait_until(lambda: min((len(one.tokens) for one in fleet.unfinished()), default=0) > 20)
        deed(replicas, fleet)
        made = [answer.result(scaled_s(60)) for answer in answers]
        for one, expected in zip(made, whole, strict=True):
            same = [a == b for a, b in zip(one.output_tokens, expected.output_tokens, strict=True)]
            assert all(same), (one.rid, same.index(False), len(one.input_tokens))
        assert {version for one in made for version in one.output_versions} == versions
        assert all(list(one.output_versions) == sorted(one.output_versions) for one in made)
        metrics = fleet.metrics()
        assert (metrics["rollout/answered"], metrics["rollout/lost"], metrics["rollout/dropped"]) == (8, 0, 0)
        assert (metrics["rollout/failures"] + metrics["rollout/refused_versions"] > 0) == (failures > 0)
    finally:
        fleet.close()
