"""Which ranks share a host, and its cores."""

import os
import socket


def host_id() -> str:
    """The name of this host, or NCCL_HOSTID where it is set, as for NCCL: ranks of one host share memory."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def num_cores() -> int:
    """Cores of this host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
