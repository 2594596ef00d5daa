"""Dispatch under its known name; the code is in rlsys.single_controller.dispatch."""

from rlsys.single_controller.dispatch import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)

__all__ = [
    "MAGIC_ATTR",
    "Dispatch",
    "Execute",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
