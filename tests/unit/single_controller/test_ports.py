"""Ports that are chosen now and used a little later."""

import socket
import sys
from subprocess import PIPE, Popen

import pytest

from rlsys.single_controller import worker
from rlsys.single_controller.worker import QUIET_PORTS, free_port


def test_a_free_port_can_be_listened_on_and_is_none_of_outgoing_connections() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 10
    assert set(ports) <= set(QUIET_PORTS)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))
        server.listen()
        assert all(free_port() != ports[0] for _ in range(50))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names of sockets without files")
def test_no_port_is_given_twice_while_the_one_who_has_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that start together use their ports seconds after they have them."""
    monkeypatch.setattr(worker, "QUIET_PORTS", range(31000, 31032))
    script = "from rlsys.single_controller import worker; worker.QUIET_PORTS = range(31000, 31032)\n"
    script += "print(*[worker.free_port() for _ in range(12)], flush=True); input()"
    with Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdin
        assert other.stdout
        theirs = set(map(int, other.stdout.readline().split()))
        ours = [free_port() for _ in range(12)]
        other.stdin.write("\n")
    assert len(theirs) == len({*ours}) == 12
    assert not theirs & {*ours}
