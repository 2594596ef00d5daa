"""External servers whose health fails while they still answer requests."""

import pytest

from rlsys.fleet.external.server import ServerReplica
from rlsys.utils.errors import DeadlineError
from tests.timing import scaled_s
from tests.unit.fleet.test_external import Fleet, fleet, num_tokens, requests_of, wait_for  # noqa: F401


def test_what_keeps_a_server_from_being_used_is_named(
    fleet: Fleet,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(self: ServerReplica) -> object:
        raise TypeError("an answer of another shape")

    monkeypatch.setattr(ServerReplica, "_identify", fails)
    (server,) = fleet.serve()
    with pytest.raises(DeadlineError, match=f"start the servers first. {server.url}: TypeError.*of another shape"):
        fleet.engine(server, start_s=scaled_s(0.5)).connect()


def test_a_request_has_one_stream_after_outages_in_which_its_streams_went_on(
    fleet: Fleet,  # noqa: F811
) -> None:
    (server,) = fleet.serve()
    fleet.hold(3)
    engine = fleet.engine(server, timeout_s=60)
    (answer,) = engine.submit(requests_of(1, num_tokens=100))
    for outage in (1, 2):
        wait_for(lambda: num_tokens(engine) == 3 * outage)  # noqa: B023
        server.health_status = 500
        wait_for(lambda: engine.metrics()["rollout/restarts"] == outage)  # noqa: B023
        server.health_status = 200
    wait_for(lambda: num_tokens(engine) == 9)
    wait_for(lambda: server.open == 1)
    answer.cancel()
