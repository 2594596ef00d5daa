"""Where the host would wait for a GPU, found on a CPU: the engine computes on `DEVICE`, and its tensors are followed.

`DEVICE` is the CPU under a name of its own. A tensor that is made there, copied there or computed from such a tensor is
the GPU's; the others are the host's. What C++ does inside one operator is not seen.
"""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlsys.protocol import DataProto

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
aten = torch.ops.aten
READING = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.bincount}
READING |= {aten._unique2, aten.unique_dim, aten.unique_consecutive}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
DEVICE_OF = Tensor.device.__get__  # type: ignore[attr-defined]
READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu}
WRITES = {Tensor.to, Tensor.copy_, torch.tensor, torch.as_tensor}


class _Followed:
    """The storages of a GPU's tensors; none is forgotten, so that no address means another tensor later."""

    def __init__(self) -> None:
        self._refs: dict[int, StorageWeakRef] = {}

    def add(self, values: object) -> None:
        for tensor in _plain(values):
            ref = StorageWeakRef(tensor.untyped_storage())
            self._refs.setdefault(ref.cdata, ref)

    def __contains__(self, tensor: object) -> bool:
        return any(StorageWeakRef(x.untyped_storage()).cdata in self._refs for x in _plain(tensor))


class _Functions(TorchFunctionMode):
    """Sees what Python calls with which device, before the CPU makes one of both."""

    def __init__(self, followed: _Followed, waits: list[str]) -> None:
        self.followed, self.waits = followed, waits

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own, *others = args or (None,)
        is_followed = own in self.followed
        if func == DEVICE_OF:
            return DEVICE if is_followed else func(*args)
        given = [x for x in (*others, *kwargs.values()) if isinstance(x, (torch.device, str))]
        target = next((torch.device(x) for x in given if str(x).startswith("cpu")), None)
        if func is Tensor.copy_ and is_followed:
            target, is_followed = DEVICE, others[0] in self.followed
        if is_followed and (func in READS or (func is Tensor.to and target == HOST)):
            self.waits.append(f"Tensor.{func.__name__} {_place()}")
            result = func(*args, **kwargs)
            return result.clone() if isinstance(result, Tensor) else result
        if func in WRITES and target == DEVICE and not is_followed and not kwargs.get("non_blocking"):
            self.waits.append(f"{func.__name__} to the device {_place()}")
        result = func(*args, **kwargs)
        if target == DEVICE:
            self.followed.add(result)
        return result


class _Operators(TorchDispatchMode):
    """Sees what is computed, in backward passes too."""

    def __init__(self, followed: _Followed, waits: list[str]) -> None:
        super().__init__()
        self.followed, self.waits = followed, waits

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(tensor in self.followed for tensor in _plain((args, kwargs))):
            return func(*args, **kwargs)
        if self._waits(func.overloadpacket, args, kwargs):
            self.waits.append(f"{func} {_place()}")
        result = func(*args, **kwargs)
        given = zip(func._schema.arguments, args, strict=False)
        self.followed.add(
            (result, [x for argument, x in given if argument.alias_info and argument.alias_info.is_write])
        )
        return result

    def _waits(self, operator: Any, args: Any, kwargs: Any) -> bool:
        if operator is aten.repeat_interleave:
            return kwargs.get("output_size") is None and not any(isinstance(x, int) for x in args[1:2])
        if operator not in INDEXING:
            return operator in READING
        indices, values = [index for index in args[1] if index is not None], args[2:3]
        is_fill = any(x.ndim == 0 for x in values)  # a masked_fill, which needs no places
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return not is_fill
        return any(index not in self.followed for index in indices)


def _plain(values: object) -> Iterator[Tensor]:
    """The tensors in `values` that have a storage, those inside DTensors among them."""
    for value in tree_leaves(values):
        inner = getattr(value, "_local_tensor", value) if isinstance(value, Tensor) else None
        if inner is not None and not inner.is_meta:
            yield inner


def _place() -> str:
    """Where a call comes from: the innermost line beside torch's, and the innermost of this repository."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    names = [f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}" for frame in frames]
    ours = [name for name in names if name.startswith(f"{ROOT}/rlsys/")]
    others = [name for name in names if not name.startswith("torch/")]
    return " from ".join(name.removeprefix(f"{ROOT}/") for name in dict.fromkeys((*others[-1:], *ours[-1:])))


@contextmanager
def host_waits(engine: Any, rows: DataProto) -> Iterator[list[str]]:
    """Collects the waits within the block, in which the tensors that exist are a GPU's, except those of `rows`."""
    followed, waits, own = _Followed(), list[str](), _Followed()
    own.add([*rows.tensors.values()])
    followed.add([x for x in gc.get_objects() if issubclass(type(x), Tensor) and x not in own])
    ranks, engine.ranks = engine.ranks, replace(engine.ranks, device=DEVICE)
    current = patch.object(torch.cuda, "current_device", lambda: DEVICE)
    with current, _Operators(followed, waits), _Functions(followed, waits):
        yield waits
    engine.ranks = ranks
