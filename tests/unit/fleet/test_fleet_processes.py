"""A fleet of real engines in processes of their own that are killed, stopped or left half updated while they decode."""

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest

from rlsys.config.schema.rollout import GenerationConfig
from rlsys.fleet.fleet import FleetDeadlines, RolloutFleet
from rlsys.fleet.requests import Replica
from rlsys.rollout.hf.engine import HFRollout
from rlsys.rollout.partial import complete
from rlsys.types import ModelRequest, ModelResponse, SamplingParams
from rlsys.utils.errors import WeightTransferError
from tests.contracts.rollout_engine import requests_of, tiny_model
from tests.timing import scaled_s, wait_until
from tests.unit.fleet.engine_process import EngineProcess

PARAMS = SamplingParams(600, ignore_eos=True, seed=100)
"""A seed of which no token is at a boundary that the rounding of another batch would cross."""
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload([__name__])
HURRIES = SERVER.Value("b", False, lock=False)


def engine_of() -> HFRollout:
    return HFRollout(tiny_model(), GenerationConfig(seed=11))


def slow_engine(hurries: Any) -> HFRollout:
    """An engine that takes half a minute for its answers until `hurries.value`."""
    engine, passes = engine_of(), itertools.count()

    def slow_down(*_: object) -> None:
        if next(passes) > 30 and not hurries.value:
            time.sleep(0.05)

    engine.model.register_forward_pre_hook(slow_down)
    return engine


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
    HURRIES.value = False
    make_engine = partial(slow_engine, HURRIES)
    made = [EngineProcess(f"process {number}", make_engine, start_method="forkserver") for number in range(2)]
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
    exchange_s = scaled_s(2 if deed is stop else 30)
    deadlines = FleetDeadlines(
        generate_s=scaled_s(60), exchange_s=exchange_s, health_s=exchange_s / 2, restart_s=scaled_s(20)
    )
    fleet = RolloutFleet(replicas, chunk_rows=4, deadlines=deadlines, on_restart=bring)
    try:
        with fleet.pushing(3):
            for replica in replicas:
                replica.update(3)
        answers = fleet.submit(wanted())
        assert wait_until(lambda: min((len(one.tokens) for one in fleet.unfinished()), default=0) > 20, 60)
        deed(replicas, fleet)
        HURRIES.value = True
        made = [answer.result(scaled_s(60)) for answer in answers]
        for one, expected in zip(made, whole, strict=True):
            same = [a == b for a, b in zip(one.output_tokens, expected.output_tokens, strict=True)]
            assert all(same), (one.rid, same.index(False), len(one.input_tokens))
        assert {version for one in made for version in one.output_versions} == versions
        assert all(list(one.output_versions) == sorted(one.output_versions) for one in made)
        metrics = fleet.metrics()
        assert (metrics["rollout/answered"], metrics["rollout/dropped"]) == (8, 0)
        assert (metrics["rollout/failures"] + metrics["rollout/refused_versions"] > 0) == (failures > 0)
    finally:
        fleet.close()
