"""Which ranks share a host, its cores and its network interfaces."""

import os
import socket

import psutil


def host_id() -> str:
    """The name of this host, or NCCL_HOSTID where it is set, as for NCCL: ranks of one host share memory."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def num_cores() -> int:
    """Cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interface_of(address: str) -> str:
    """The network interface that has this address, empty if none has."""
    return next((name for name, of in psutil.net_if_addrs().items() if address in {one.address for one in of}), "")
