"""Python values as JSON that keeps their types: what rows carry besides tensors.

str, int, float, bool, None, list and dict (with str keys) are plain JSON. Everything else is an object with the key
"$": tuple, bytes, numpy scalars, dicts with other keys, object arrays; tensors and number arrays name a buffer
that travels beside the JSON. Any other type is a TypeError: nothing is ever pickled or imported.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

PLAIN = {str, int, float, bool, type(None)}
BUFFER_KINDS = "biufcSUmM"


class WireError(ValueError):
    """Bytes that should hold a DataProto do not: truncated, corrupt or made by something else."""


Store = Callable[[Tensor | np.ndarray], dict[str, Any]]
"""Puts an array or tensor among the buffers and returns its description."""

Fetch = Callable[[dict[str, Any]], Any]
"""The inverse of Store."""


def dumps(value: Any) -> bytes:
    """Compact JSON in ASCII; TypeError for values nested too deeply."""
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except RecursionError as error:
        raise TypeError("a value is nested too deeply for the wire") from error


def loads(text: bytes | memoryview, fetch: Fetch) -> Any:
    """Read JSON with typed values; WireError for anything malformed."""
    try:
        return json.loads(bytes(text), object_hook=lambda entry: unpack(entry, fetch) if "$" in entry else entry)
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is not valid: {error}") from error


def pack(value: Any, where: str, store: Store) -> Any:
    """A JSON value for `value`; TypeError naming `where` for a type that has none."""
    try:
        return _pack(value, where, store)
    except RecursionError as error:
        raise TypeError(f"{where}: nested too deeply or in a circle") from error


def _pack(value: Any, where: str, store: Store) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is list:
        return _pack_list(value, where, store)
    if kind is dict:
        return _pack_dict(value, where, store)
    if kind is tuple:
        return {"$": "tuple", "v": _pack_list(value, where, store)}
    if kind is bytes:
        return {"$": "bytes", "v": _text(value)}
    if isinstance(value, np.generic):
        return _pack_scalar(value, where)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return {"$": "objects", "s": list(value.shape), "v": _pack_list(value.ravel().tolist(), where, store)}
    if isinstance(value, Tensor | np.ndarray):
        return _stored(value, where, store)
    if isinstance(value, StrEnum | IntEnum):
        return value.value
    raise TypeError(f"{where}: a {kind.__module__}.{kind.__qualname__} cannot travel; send plain values or arrays")


def _pack_list(items: list[Any] | tuple[Any, ...], where: str, store: Store) -> list[Any]:
    if set(map(type, items)) <= PLAIN:
        return list(items)
    return [_pack(item, where, store) for item in items]


def _pack_dict(items: dict[Any, Any], where: str, store: Store) -> dict[str, Any]:
    if "$" in items or set(map(type, items)) - {str}:
        return {"$": "dict", "v": [[_pack(k, where, store), _pack(v, where, store)] for k, v in items.items()]}
    if set(map(type, items.values())) <= PLAIN:
        return items
    return {key: _pack(item, where, store) for key, item in items.items()}


def _pack_scalar(value: np.generic, where: str) -> dict[str, Any]:
    if isinstance(value, np.str_):
        return {"$": "np.str", "v": str(value)}
    if isinstance(value, np.bytes_):
        return {"$": "np.bytes", "v": _text(bytes(value))}
    if value.dtype.kind not in BUFFER_KINDS:
        raise TypeError(f"{where}: a numpy {value.dtype} scalar cannot travel")
    return {"$": "scalar", "d": value.dtype.str, "v": _text(value.tobytes())}


def _stored(value: Tensor | np.ndarray, where: str, store: Store) -> dict[str, Any]:
    try:
        return store(value)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error


def unpack(entry: dict[str, Any], fetch: Fetch) -> Any:
    """The value of one tagged JSON object; WireError for an unknown or malformed one."""
    tag = entry.get("$")
    reader = _READERS.get(tag) if isinstance(tag, str) else None
    try:
        return fetch(entry) if reader is None else reader(entry["v"], entry)
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        raise WireError(f"a malformed {tag!r} value in the header: {error}") from error


def _read_tuple(value: Any, _: Any) -> tuple[Any, ...]:
    return tuple(_expect(value, list))


def _read_bytes(value: Any, _: Any) -> bytes:
    return base64.b64decode(_expect(value, str).encode("ascii"), validate=True)


def _read_dict(value: Any, _: Any) -> dict[Any, Any]:
    pairs = [_expect(pair, list) for pair in _expect(value, list)]
    return {key: item for key, item in pairs}  # noqa: C416


def _read_objects(value: Any, entry: dict[str, Any]) -> np.ndarray:
    items, shape = _expect(value, list), read_shape(entry["s"])
    if math.prod(shape) != len(items):
        raise WireError(f"an object array of shape {shape} came with {len(items)} entries")
    column = np.empty(len(items), dtype=object)
    for row, item in enumerate(items):
        column[row] = item
    return column.reshape(shape)


def _read_scalar(value: Any, entry: dict[str, Any]) -> np.generic:
    (scalar,) = np.frombuffer(_read_bytes(value, entry), dtype=read_dtype(entry["d"]))
    return scalar


_READERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "tuple": _read_tuple,
    "bytes": _read_bytes,
    "dict": _read_dict,
    "objects": _read_objects,
    "scalar": _read_scalar,
    "np.str": lambda value, _: np.str_(_expect(value, str)),
    "np.bytes": lambda value, entry: np.bytes_(_read_bytes(value, entry)),
}


def read_dtype(name: Any) -> np.dtype[Any]:
    """A numpy dtype of plain numbers, strings or times by its `str`; WireError otherwise."""
    text = _expect(name, str)
    if len(text) > 32 or text[:1] not in "<>|=" or text[1:2] not in set(BUFFER_KINDS):
        raise WireError(f"{text[:32]!r} is not the dtype of a number array")
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError) as error:
        raise WireError(f"{text!r} is not a dtype: {error}") from error
    if dtype.str != text or not dtype.itemsize:
        raise WireError(f"{text!r} is not the dtype of a number array")
    return dtype


def read_shape(sizes: Any) -> tuple[int, ...]:
    """A shape of at most 32 dimensions whose product fits 63 bits even without its zeros; WireError otherwise."""
    shape = tuple(_expect(sizes, list))
    if len(shape) > 32 or any(type(size) is not int or size < 0 for size in shape):
        _wrong(f"{str(sizes)[:64]} is not a shape")
    product = 1
    for size in shape:
        product *= max(size, 1)
        if product >= 1 << 48:
            _wrong(f"{str(sizes)[:64]} is too large a shape")
    return shape


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        _wrong(f"expected a {kind.__name__}, got a {type(value).__name__}")
    return value


def _wrong(message: str) -> NoReturn:
    raise WireError(message)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
