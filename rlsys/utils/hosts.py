"""Which ranks share a host, its cores and its network interfaces."""

import os
import socket
from pathlib import Path

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """NCCL_HOSTID where it is set, else the name of this host with its boot id, as for NCCL: ranks of one share memory.

    Machines that were made from one image may have one name.
    """
    boot_id = BOOT_ID.read_text()[:8] if BOOT_ID.is_file() else ""
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()}-{boot_id}"


def num_cores() -> int:
    """Cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interface_of(address: str) -> str:
    """The network interface that has this address, empty if none has."""
    return next((name for name, of in psutil.net_if_addrs().items() if address in {one.address for one in of}), "")
