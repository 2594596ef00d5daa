"""The wire form of a DataProto: a typed JSON header and the raw memory of its tensors and number arrays.

Nothing is pickled. `encode` copies nothing that is contiguous on the CPU; `decode` aliases what it is given, as
read-only tensors unless the memory is a bytearray handed over for good. Every length, dtype, shape and name in a
header is checked before it is used, and a bad one is a `WireError`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlsys.protocol.readonly import plain, readonly
from rlsys.protocol.values import WireError, dumps, loads, pack, read_dtype, read_shape

VERSION = 1
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclass(frozen=True)
class Parts:
    """The three parts of a DataProto; `num_rows` and `device` are those of the TensorDict."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]


def encode(
    batch: TensorDict | None, non_tensor_batch: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]
) -> tuple[bytes, list[memoryview]]:
    """(header, buffers); TypeError naming the key whose value cannot travel."""
    buffers: list[memoryview] = []
    stored: dict[int, tuple[Tensor | np.ndarray, dict[str, Any]]] = {}

    def store(value: Tensor | np.ndarray) -> dict[str, Any]:
        if id(value) not in stored:
            description, buffer = _describe(value)
            stored[id(value)] = value, {**description, "b": len(buffers)}
            buffers.append(buffer)
        return stored[id(value)][1]

    tensors = [] if batch is None else batch.items()
    header = {
        "version": VERSION,
        "rows": None if batch is None else batch.batch_size[0],
        "on": None if batch is None or batch.device is None else "cpu",
        "batch": [[_name(key), _pack_tensor(key, value, store)] for key, value in tensors],
        "columns": [[_name(key), _pack_column(key, array, store)] for key, array in non_tensor_batch.items()],
        "meta": [[_name(key), pack(value, f"meta_info '{key}'", store)] for key, value in meta_info.items()],
    }
    return dumps(header), buffers


def decode(header: bytes | memoryview, buffers: Sequence[Any]) -> Parts:
    """The parts over the memory of `buffers`; WireError unless header and buffers fit exactly."""
    views = [_bytes_of(buffer) for buffer in buffers]
    fetched: dict[int, tuple[tuple[Any, ...], Tensor | np.ndarray]] = {}

    def fetch(entry: dict[str, Any]) -> Tensor | np.ndarray:
        index = entry.get("b")
        if type(index) is not int or not 0 <= index < len(views):
            raise WireError(f"{str(index)[:32]} is not the number of a buffer")
        form = _form(entry)
        if index not in fetched:
            fetched[index] = form, _restore(*form, views[index], owned=isinstance(buffers[index], bytearray))
        if fetched[index][0] != form:
            raise WireError(f"buffer {index} is described in two ways")
        return fetched[index][1]

    fields = loads(header, fetch)
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise WireError("this is not the header of a DataProto of this version")
    parts = _parts(fields)
    if len(fetched) != len(views):
        raise WireError(f"{len(views) - len(fetched)} buffers are not named by the header")
    return parts


def _parts(fields: dict[str, Any]) -> Parts:
    rows, on = fields.get("rows"), fields.get("on")
    tensors = _pairs(fields, "batch", Tensor)
    arrays = _pairs(fields, "columns", np.ndarray)
    meta = _pairs(fields, "meta", object)
    if on not in (None, "cpu") or (rows is None and tensors):
        raise WireError("the header does not say how many rows there are, or where")
    if rows is not None and (type(rows) is not int or not 0 <= rows < 1 << 48):
        raise WireError(f"{str(rows)[:32]} is not a number of rows")
    num_rows = {len(value) if value.ndim else -1 for value in (*tensors.values(), *arrays.values())}
    if len(num_rows) > 1 or -1 in num_rows or (rows is not None and num_rows - {rows}):
        raise WireError(f"columns with {sorted(num_rows)} rows in a batch of {rows}")
    batch = None if rows is None else TensorDict(tensors, batch_size=(rows,), device=on)
    return Parts(batch, arrays, meta)


def _pairs(fields: dict[str, Any], name: str, kind: type) -> dict[str, Any]:
    entries = fields.get(name)
    if not isinstance(entries, list):
        raise WireError(f"the header has no list '{name}'")
    pairs: dict[str, Any] = {}
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2 or type(entry[0]) is not str or entry[0] in pairs:
            raise WireError(f"an entry of '{name}' is not a name with a value")
        if not isinstance(entry[1], kind):
            raise WireError(f"'{entry[0][:64]}' in '{name}' is a {type(entry[1]).__name__}")
        pairs[entry[0]] = entry[1]
    return pairs


def _name(key: Any) -> str:
    if type(key) is not str:
        raise TypeError(f"{key!r} is not a string, so it cannot name a column on the wire")
    return key


def _pack_tensor(key: str, value: Any, store: Any) -> Any:
    if not isinstance(value, Tensor):
        raise TypeError(f"batch '{key}': a {type(value).__name__} cannot travel as a tensor")
    return pack(value, f"batch '{key}'", store)


def _pack_column(key: str, array: np.ndarray, store: Any) -> Any:
    if not array.ndim:
        raise TypeError(f"non_tensor_batch '{key}': an array without rows cannot travel")
    return pack(array, f"non_tensor_batch '{key}'", store)


def _describe(value: Tensor | np.ndarray) -> tuple[dict[str, Any], memoryview]:
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if value.dtype.kind not in "biufcSUmM":
        raise TypeError(f"an array of dtype {value.dtype} cannot travel")
    flat = np.ascontiguousarray(value).reshape(-1)
    return {"$": "array", "d": value.dtype.str, "s": list(value.shape)}, _memory_of(flat)


def _describe_tensor(value: Tensor) -> tuple[dict[str, Any], memoryview]:
    if value.layout != torch.strided or value.is_nested or value.dtype not in NAMES:
        raise TypeError(f"a {value.layout} tensor of {value.dtype} cannot travel")
    flat = plain(value).detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return {"$": "tensor", "d": NAMES[value.dtype], "s": list(value.shape)}, _memory_of(flat.view(torch.uint8).numpy())


def _memory_of(flat: np.ndarray) -> memoryview:
    return memoryview(flat.view(np.uint8)) if flat.nbytes else memoryview(b"")  # pyrefly: ignore


def _bytes_of(buffer: Any) -> memoryview:
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise WireError(f"a {type(buffer).__name__} is not a contiguous buffer") from error


def _form(entry: dict[str, Any]) -> tuple[str, Any, tuple[int, ...]]:
    kind, name, shape = entry["$"], entry.get("d"), read_shape(entry.get("s"))
    if kind == "array":
        return kind, read_dtype(name), shape
    if kind == "tensor" and isinstance(name, str) and name in DTYPES:
        return kind, DTYPES[name], shape
    raise WireError(f"{str(kind)[:32]!r} of {str(name)[:32]!r} is not a kind of value")


def _restore(kind: str, dtype: Any, shape: tuple[int, ...], memory: memoryview, *, owned: bool) -> Tensor | np.ndarray:
    if math.prod(shape) * dtype.itemsize != memory.nbytes:
        raise WireError(f"{memory.nbytes} bytes for shape {shape} of {dtype}")
    if kind == "tensor":
        return _restore_tensor(dtype, shape, memory, owned=owned)
    if not memory.nbytes:
        return np.empty(shape, dtype)
    array = np.frombuffer(memory if owned else memory.toreadonly(), dtype)
    limit = {"b": (np.uint8, 1), "U": (np.dtype(np.uint32).newbyteorder(dtype.byteorder), 0x10FFFF)}.get(dtype.kind)
    if limit and array.view(limit[0]).max() > limit[1]:
        raise WireError(f"an array of {dtype} holds something else")
    return array.reshape(shape)


def _restore_tensor(dtype: torch.dtype, shape: tuple[int, ...], memory: memoryview, *, owned: bool) -> Tensor:
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if dtype == torch.bool and int(tensor.max()) > 1:
        raise WireError("a tensor of bool holds something else")
    if tensor.data_ptr() % dtype.itemsize:
        return tensor.clone().view(dtype).view(shape)
    tensor = tensor.view(dtype).view(shape)
    return tensor if owned else readonly(tensor)
