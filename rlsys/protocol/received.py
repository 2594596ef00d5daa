"""Tensors that were received over read-only memory: copied when the receiver first uses them."""

import threading
from functools import cache
from typing import NamedTuple

from tensordict import TensorDict

from rlsys.protocol.columns import copy_rows

_COPYING = threading.Lock()


class ReceivedBatch(NamedTuple):
    """Tensors over memory that must not be written."""

    tensors: TensorDict


class OwnBatch:
    """An attribute that holds a TensorDict or None; a ReceivedBatch is replaced by a copy when it is first read."""

    def __get__(self, rows: object | None, owner: type | None = None) -> TensorDict | None:
        if rows is None:
            return None  # the default of a dataclass field
        if isinstance(vars(rows)["batch"], ReceivedBatch):
            with _COPYING:
                if isinstance(received := vars(rows)["batch"], ReceivedBatch):
                    vars(rows)["batch"] = received.tensors.apply(cache(copy_rows))  # one with two names once
        return vars(rows)["batch"]

    def __set__(self, rows: object, batch: TensorDict | ReceivedBatch | None) -> None:
        vars(rows)["batch"] = batch
