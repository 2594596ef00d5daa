"""Calls between processes: results, errors, callbacks, deadlines and the end of the other process."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.ipc.rpc import RpcClient, RpcServer
from rlsys.utils.errors import DeadlineError, RolloutError, WeightTransferError
from tests.timing import scaled_s, wait_until


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., RpcClient]]:
    os.chmod(tmp_path, 0o700)
    clients: list[RpcClient] = []

    def start(methods: dict[str, Any], **callbacks: Any) -> RpcClient:
        path = tmp_path / "s"
        server = RpcServer(path, methods, on_thread_start=lambda: None)
        methods["call_home"] = lambda *args: server.call_back("home", *args)
        clients.append(RpcClient(path, "the scheduler", callbacks, error=RolloutError))
        return clients[0]

    yield start
    for client in clients:
        client.close()


def test_calls_return_raise_and_call_back(connect: Callable[..., RpcClient]) -> None:
    def refuse() -> None:
        raise WeightTransferError("not whole")

    inner: list[Any] = []

    def home(number: int) -> int:
        inner.append(client.call("add", number, 1, deadline_s=scaled_s(10)))
        return number

    def fail() -> None:
        raise LookupError("nothing there")

    client = connect({"add": lambda a, b: a + b, "refuse": refuse, "fail": fail, "odd": lambda: {1, 2}}, home=home)
    assert client.call("add", (1,), (2,), deadline_s=scaled_s(10)) == (1, 2)
    with pytest.raises(WeightTransferError, match="not whole"):
        client.call("refuse", deadline_s=scaled_s(10))
    with pytest.raises(RolloutError, match="LookupError: nothing there"):
        client.call("fail", deadline_s=scaled_s(10))
    with pytest.raises(RolloutError, match=r"TypeError: value: a builtins\.set cannot be sent"):
        client.call("odd", deadline_s=scaled_s(10))
    with pytest.raises(ValueError, match="no method 'nothing'"):
        client.call("nothing", deadline_s=scaled_s(10))
    assert client.call("call_home", 4, deadline_s=scaled_s(10)) == 4
    assert inner == [5], "a call made while another one runs has a connection of its own"
    client.check_alive()


def test_a_call_that_hangs_names_peer_and_method(connect: Callable[..., RpcClient]) -> None:
    client = connect({"hang": lambda: time.sleep(scaled_s(2)), "one": lambda: 1})
    with pytest.raises(DeadlineError, match=r"the scheduler did not answer within 0.2 s at stage 'hang'"):
        client.call("hang", deadline_s=0.2)
    assert client.call("one", deadline_s=scaled_s(10)) == 1, "the next call has a new connection"


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_the_exit_of_the_other_process_is_an_error(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    child = os.fork()
    if child == 0:
        RpcServer(tmp_path / "s", {"die": lambda: os._exit(1)}, on_thread_start=lambda: None)
        time.sleep(30)
        os._exit(0)
    assert wait_until(lambda: can_connect(tmp_path / "s"))
    client = RpcClient(tmp_path / "s", "the scheduler", {}, error=RolloutError)
    client.check_alive()
    with pytest.raises(RolloutError, match="the scheduler exited during 'die'; see its log"):
        client.call("die", deadline_s=scaled_s(10))
    os.waitpid(child, 0)
    with pytest.raises(RolloutError, match="exited"):
        client.check_alive()
    with pytest.raises(RolloutError, match="cannot connect to the scheduler"):
        RpcClient(tmp_path / "none", "the scheduler", {}, error=RolloutError)


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(PermissionError, match="open to other users"):
        RpcServer(tmp_path / "s", {}, on_thread_start=lambda: None)


def test_an_os_error_of_either_side_is_an_answer(connect: Callable[..., RpcClient]) -> None:
    def missing() -> None:
        raise FileNotFoundError("no such file")

    def late() -> None:
        raise DeadlineError("the disk", "read", 1.0)

    methods: dict[str, Any] = {"missing": missing, "one": lambda: 1}
    client = connect(methods, home=late)
    with pytest.raises(RolloutError, match="FileNotFoundError: no such file"):
        client.call("missing", deadline_s=scaled_s(10))
    with pytest.raises(RolloutError, match="DeadlineError: the disk did not answer within 1 s"):
        client.call("call_home", deadline_s=scaled_s(10))
    assert client.call("one", deadline_s=scaled_s(10)) == 1
