"""Plain values as JSON and raw bytes: what goes between a rollout worker and SGLang's scheduler process.

Only the records that `allow` has named are ever built from a message; nothing is unpickled.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

KIND = "$"
_records: dict[str, type] = {}


def allow(*types: type) -> None:
    """Let these frozen dataclasses cross; both sides must call it."""
    for record in types:
        if not is_dataclass(record) or _records.setdefault(record.__name__, record) is not record:
            raise ValueError(f"{record} is no dataclass, or another one of its name crosses already")


def encode(value: Any, blobs: list[bytes]) -> Any:
    """A value as JSON has it; arrays and tensors are appended to `blobs`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, blobs) for item in value]
    if isinstance(value, tuple):
        return {KIND: "tuple", "items": [encode(item, blobs) for item in value]}
    if isinstance(value, Mapping):
        return {KIND: "dict", "items": [[encode(k, blobs), encode(v, blobs)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {KIND: "bytes", "text": b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return _array("array", value, str(value.dtype), blobs)
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _array("tensor", flat, str(value.dtype).removeprefix("torch."), blobs) | {"shape": list(value.shape)}
    kind = type(value)
    if _records.get(kind.__name__) is kind:
        named = {field.name: encode(getattr(value, field.name), blobs) for field in fields(kind)}
        return {KIND: kind.__name__, "fields": named}
    raise TypeError(f"a {type(value).__name__} may not cross between processes")


def _array(kind: str, array: np.ndarray, dtype: str, blobs: list[bytes]) -> dict[str, Any]:
    blobs.append(np.ascontiguousarray(array).tobytes())
    return {KIND: kind, "blob": len(blobs) - 1, "dtype": dtype, "shape": list(array.shape)}


def decode(value: Any, blobs: list[bytearray]) -> Any:
    """The value that `encode` was given; ValueError for what nobody allowed."""
    if isinstance(value, list):
        return [decode(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[KIND]
    if kind == "tuple":
        return tuple(decode(item, blobs) for item in value["items"])
    if kind == "dict":
        return {decode(k, blobs): decode(v, blobs) for k, v in value["items"]}
    if kind == "bytes":
        return b64decode(value["text"])
    if kind == "array":
        return np.frombuffer(blobs[value["blob"]], dtype=value["dtype"]).reshape(value["shape"])
    if kind == "tensor":
        dtype, blob = getattr(torch, value["dtype"]), blobs[value["blob"]]
        flat = torch.frombuffer(blob, dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).view(value["shape"])
    if kind not in _records:
        raise ValueError(f"a record '{kind}' may not cross between processes")
    return _records[kind](**{name: decode(item, blobs) for name, item in value["fields"].items()})
