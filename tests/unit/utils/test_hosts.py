"""Which ranks are taken to share a host."""

import socket
from pathlib import Path

import pytest

from rlsys.utils import hosts


def test_machines_of_one_name_differ_by_their_boot_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    names = []
    for machine in ("0c1fae22-a31b", "7d99e411-a31b"):
        (tmp_path / machine).write_text(f"{machine}\n")
        monkeypatch.setattr(hosts, "BOOT_ID", tmp_path / machine)
        names.append(hosts.host_id())
    assert names == [f"{socket.gethostname()}-0c1fae22", f"{socket.gethostname()}-7d99e411"]
    monkeypatch.setattr(hosts, "BOOT_ID", tmp_path / "none")
    assert hosts.host_id().startswith(socket.gethostname())
    monkeypatch.setenv("NCCL_HOSTID", "rack-3")
    assert hosts.host_id() == "rack-3"
