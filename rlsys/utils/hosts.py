"""Which ranks share a host."""

import os
import socket


def host_id() -> str:
    """The name of this host, or NCCL_HOSTID where it is set, as for NCCL: ranks of one host share memory."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()
