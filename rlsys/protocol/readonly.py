"""Tensors over shared memory: they compute like any other and refuse to be written.

A `ReadOnlyTensor` is a tensor over shared memory. Operations give plain tensors; views of it stay read-only; in-place
operations, `out=`, `__setitem__` and the like raise `ReadOnlyError`. The test is made where torch dispatches to its
kernels, by each operation's own schema, so it does not depend on how the operation was spelled. Writing through
`data_ptr()` or `untyped_storage()` is out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

HINT = "this tensor aliases a received batch in shared memory; write to data.writable() or to a clone() instead"


class ReadOnlyError(RuntimeError):
    """An operation tried to write into the memory of a received batch."""


class ReadOnlyTensor(Tensor):
    """A tensor whose memory must not be written; made by `readonly`."""

    _plain: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written_arguments(func)
        if written and (name := _first_readonly(written, args, kwargs)):
            raise ReadOnlyError(f"{func} writes to its argument '{name}': {HINT}")
        shared: list[Tensor] = []
        out = func(*_unwrap(args, shared), **_unwrap(kwargs, shared))
        return _wrap_aliases(out, {tensor.untyped_storage().data_ptr() for tensor in shared} - {0})

    def writable(self) -> Tensor:
        """A private copy."""
        return self._plain.clone()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The same memory as an array that numpy refuses to write to."""
        array = self._plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def tolist(self) -> Any:
        return self._plain.tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.writable()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._plain.__reduce_ex__(proto)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"read-only {self._plain!r}"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ReadOnlyError(HINT)

    apply_ = map_ = map2_ = __dlpack__ = _refuse

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        self._refuse()


def readonly(tensor: Tensor) -> Tensor:
    """The same memory, guarded against writing through the result."""
    if isinstance(tensor, ReadOnlyTensor):
        return tensor
    plain = tensor.detach()
    guarded = Tensor._make_subclass(ReadOnlyTensor, plain)
    guarded._plain = plain
    return guarded


def plain(tensor: Tensor) -> Tensor:
    """The same memory without the guard, for code that only reads."""
    return tensor._plain if isinstance(tensor, ReadOnlyTensor) else tensor


def is_readonly(tensor: Tensor) -> bool:
    """Whether writing to this tensor is refused."""
    return isinstance(tensor, ReadOnlyTensor)


def readonly_array(array: np.ndarray) -> np.ndarray:
    """The same memory, guarded; object arrays as they are, since their entries are shared anyway."""
    if array.dtype == object:
        return array
    guarded = array.view()
    guarded.flags.writeable = False
    return guarded


def own(value: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """A private copy of a read-only tensor or array."""
    return plain(value).clone() if isinstance(value, Tensor) else value.copy()


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    if func.namespace == "c10d" and func._opname.endswith("_"):
        return ((0, arguments[0].name),)
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _first_readonly(
    written: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    for position, name in written:
        value = args[position] if position < len(args) else kwargs.get(name)
        if any(isinstance(tensor, ReadOnlyTensor) for tensor in _leaves(value)):
            return name
    return None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _unwrap(value: Any, shared: list[Tensor]) -> Any:
    if isinstance(value, ReadOnlyTensor):
        shared.append(value._plain)
        return value._plain
    if type(value) in (list, tuple):
        return type(value)(_unwrap(item, shared) for item in value)
    if type(value) is dict:
        return {key: _unwrap(item, shared) for key, item in value.items()}
    return value


def _wrap_aliases(out: Any, storages: set[int]) -> Any:
    if isinstance(out, Tensor):
        aliases = out.layout == torch.strided and out.untyped_storage().data_ptr() in storages
        return readonly(out) if aliases else out
    if type(out) in (list, tuple):
        return type(out)(_wrap_aliases(item, storages) for item in out)
    return out


def map_readonly(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to every read-only tensor and array inside its lists, tuples and dicts."""
    if isinstance(value, ReadOnlyTensor):
        return change(value)
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return _map_objects(value, change)
        return value if value.flags.writeable else change(value)
    if type(value) in (list, tuple):
        return type(value)(map_readonly(item, change) for item in value)
    if type(value) is dict:
        return {key: map_readonly(item, change) for key, item in value.items()}
    return value


def _map_objects(column: np.ndarray, change: Callable[[Any], Any]) -> np.ndarray:
    changed = np.empty_like(column)
    for row, item in np.ndenumerate(column):
        changed[row] = map_readonly(item, change)
    return changed
