"""Weights for external servers over process groups: real gloo groups between a trainer rank and HTTP servers.

Each test runs in a process of its own: a process that has used gloo cannot be forked any more.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.fleet.external.transfer import BroadcastTransfer
from rlsys.utils.errors import DeadlineError, WeightTransferError
from rlsys.weights.endpoints import WeightSender
from tests.ranks import run_ranks
from tests.servers import Server
from tests.timing import scaled_s, wait_until
from tests.unit.fleet.test_external import Fleet, requests_of

ROUTES = {
    "sglang": ("/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed"),
    "vllm": ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
}


class Weights:
    """Two buckets of weights that depend on `number`."""

    def __init__(self) -> None:
        self.number = 0.0

    def local_tensors(self) -> dict[str, Tensor]:
        return {"a": torch.full((3, 2), self.number), "b": torch.arange(5.0) + self.number}

    def exported(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        tensors = self.local_tensors()
        yield [("a", tensors["a"])]
        yield [("b", tensors["b"].to(torch.bfloat16))]


class Done:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self, deadline_s: float | None = None) -> Any:
        return self.value


class Trainer(WeightSender):
    """A group of one rank."""

    world_size = 1

    def execute_all_async(self, method: str, *args: Any) -> list[Done]:
        return [Done(getattr(self, method)(*args))]

    def execute_rank_async(self, rank: int, method: str, *args: Any) -> Done:
        return Done(getattr(self, method)(*args))


class Push:
    """A trainer that pushes to some servers."""

    def __init__(self, fleet: Fleet, *servers: Server) -> None:
        self.weights = Weights()
        self.engine = fleet.engine(*servers)
        self.engine.connect()
        self.deadline_s = scaled_s(20)
        self.transfer = BroadcastTransfer(
            Trainer(self.weights), self.engine, bucket_bytes=1, deadline_s=self.deadline_s
        )

    def push(self, version: int) -> int:
        self.weights.number = float(version)
        with self.engine.pushing(version):
            return self.transfer.push(version).num_bytes

    def about(self, server: Server) -> dict[str, Any]:
        return self.engine.health()["servers"][server.url]


def assert_holds(server: Server, version: int) -> None:
    assert server.version == str(version)
    assert server.weights["a"].tolist() == [[version] * 2] * 3
    assert server.weights["b"].tolist() == [version + n for n in range(5)]
    assert server.weights["b"].dtype is torch.bfloat16


def every_push(kind: str) -> None:
    fleet = Fleet(kind)
    servers = fleet.serve(2)
    job = Push(fleet, *servers)
    for version in (1, 2, 3):
        assert job.push(version) == 6 * 4 + 5 * 2
        for server in servers:
            assert_holds(server, version)
        assert {v for r in job.engine.generate(requests_of(4)) for v in r.output_versions} == {version}
    for server in servers:
        assert [path for path, _ in server.calls].count(ROUTES[fleet.kind][0]) == 1


def failing_server(kind: str, step: int, how: str) -> None:
    fleet = Fleet(kind)
    bad, good = fleet.serve(2)
    job = Push(fleet, bad, good)
    job.push(1)
    bad.group_fault = how.format(ROUTES[fleet.kind][step])
    if step == 0:  # groups are joined again after a failure only
        job.transfer._is_whole = False
    job.push(2)
    assert_holds(good, 2)
    about = job.about(bad)
    assert not about["is_admitted"]
    assert re.search("500|ClientOSError|ServerDisconnected|Cannot connect", about["cause"])
    assert {v for r in job.engine.generate(requests_of(4)) for v in r.output_versions} == {2}
    bad.group_fault = ""
    if "die" in how:
        bad.restart()
    assert wait_until(lambda: "next push" in job.about(bad)["cause"])
    job.push(3)
    for server in (bad, good):
        assert_holds(server, 3)
        assert job.about(server)["is_admitted"]


def no_server_left(kind: str) -> None:
    fleet = Fleet(kind)
    (server,) = fleet.serve(1)
    server.group_fault = ROUTES[fleet.kind][0]
    job = Push(fleet, server)
    with pytest.raises(WeightTransferError, match=f"no server took version 1:(?s:.*){server.url}(?s:.*)500"):
        job.push(1)
    server.group_fault = ""
    job.push(2)
    assert_holds(server, 2)


def open_update(kind: str) -> None:
    fleet = Fleet(kind)
    (server,) = fleet.serve(1)
    server.is_updating = True
    job = Push(fleet, server)
    job.push(1)
    assert_holds(server, 1)


def hanging_server(kind: str) -> None:
    fleet = Fleet(kind)
    (server,) = fleet.serve(1)
    job = Push(fleet, server)
    job.transfer.deadline_s = 1.0
    server.group_fault = "hang:" + ROUTES[fleet.kind][2]
    with pytest.raises(DeadlineError, match="external servers did not answer within 1 s at stage 'update_weights'"):
        job.push(1)


@pytest.mark.parametrize("kind", ROUTES)
def test_every_push_reaches_all_servers_over_the_same_groups(kind: str) -> None:
    run_ranks(1, every_push, kind)


@pytest.mark.parametrize("how", ["{}", "die:{}"])
@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("kind", ROUTES)
def test_a_server_that_fails_in_a_push_is_out_until_the_next(kind: str, step: int, how: str) -> None:
    run_ranks(1, failing_server, kind, step, how)


@pytest.mark.parametrize("kind", ROUTES)
def test_a_push_that_reaches_no_server_fails_with_the_cause(kind: str) -> None:
    run_ranks(1, no_server_left, kind)


@pytest.mark.parametrize("kind", ROUTES)
def test_an_update_that_another_job_left_open_is_ended(kind: str) -> None:
    run_ranks(1, open_update, kind)


@pytest.mark.parametrize("kind", ROUTES)
def test_a_server_that_hangs_is_named_at_the_deadline(kind: str) -> None:
    run_ranks(1, hanging_server, kind)
