"""rlsys: RLHF training with one controller and Ray worker groups."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlsys.protocol import DataProto

__all__ = ["DataProto"]


def __getattr__(name: str) -> object:
    """`rlsys.DataProto`, without torch for those who do not ask for it."""
    if name != "DataProto":
        raise AttributeError(f"module 'rlsys' has no attribute {name!r}")
    from rlsys.protocol import DataProto

    return DataProto
