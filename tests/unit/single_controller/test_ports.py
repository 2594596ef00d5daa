"""Ports that are chosen now and used a little later."""

import socket

from rlsys.single_controller.worker import QUIET_PORTS, free_port


def test_a_free_port_can_be_listened_on_and_is_none_of_outgoing_connections() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 10
    assert set(ports) <= set(QUIET_PORTS)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        assert all(free_port() != ports[0] for _ in range(50))
