"""External servers whose health fails while they still answer requests."""

from collections.abc import Iterator

import pytest

from tests.unit.fleet.test_external import ENGINES, Fleet, num_tokens, requests_of, wait_for


@pytest.fixture(params=ENGINES)
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(request.param)
    yield fleet
    for closing in (*fleet.engines, *fleet.servers):
        closing.close()


def test_a_request_has_one_stream_after_outages_in_which_its_streams_went_on(fleet: Fleet) -> None:
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
