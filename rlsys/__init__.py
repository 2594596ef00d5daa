"""rlsys: RLHF training with one controller and Ray worker groups."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

__all__ = ["DataProto"]

if sys.argv and (
    sys.argv[0] == "-m" or sys.argv[0].endswith("/rlsys")
):  # a command, whose modules take a moment to import
    sys.excepthook = lambda kind, error, trace: (
        print("rlsys: interrupted (Ctrl-C)", file=sys.stderr)
        if kind is KeyboardInterrupt
        else sys.__excepthook__(kind, error, trace)
    )


def __getattr__(name: str) -> object:
    """`rlsys.DataProto`, without torch for those who do not ask for it."""
    if name != "DataProto":
        raise AttributeError(f"module 'rlsys' has no attribute {name!r}")
    from rlsys.protocol import DataProto

    return DataProto
