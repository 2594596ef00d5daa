"""What DataProto is made of: equality, unions and merges of its three parts, each a plain function.

Copies of many rows on the CPU go to huge pages (numpy asks for them, torch does not).
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlsys.ipc.codec import object_array

HUGE_BYTES = 1 << 22


def described(
    num_rows: int, batch: TensorDict | None, arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, object]
) -> str:
    """A line for each column and entry, however many rows there are."""
    short = reprlib.Repr()
    short.maxlist = short.maxdict = short.maxtuple = 4
    short.maxstring = short.maxother = 60
    lines = [(name, f"{str(v.dtype)[6:]} {tuple(v.shape)} on {v.device}") for name, v in tensors_of(batch).items()]
    lines += [(name, f"{v.dtype} {v.shape} {short.repr(v[:2].tolist())[:60]}") for name, v in arrays.items()]
    lines += [(f"meta_info[{name!r}]", short.repr(value)[:80]) for name, value in meta_info.items()]
    width = max((len(name) for name, _ in lines), default=0)
    return "\n".join([f"DataProto of {num_rows} rows", *(f"  {name:{width}}  {text}" for name, text in lines)])


def object_rows(rows: Sequence[Any]) -> np.ndarray:
    """An object array with `rows` as its rows: arrays of one shape are stacked, anything else is one entry a row."""
    stackable = all(isinstance(row, np.ndarray) for row in rows) and len({row.shape for row in rows}) == 1
    return np.stack(rows).astype(object) if stackable else object_array(rows)


def deep_equal(a: object, b: Any, _path: tuple[int, ...] = ()) -> bool:
    """Equality of type and value with NaN equal to NaN, through arrays, tensors, lists, tuples and dicts."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and tensors_equal(a, b)
    if type(a) is not type(b):
        return False
    if id(a) in _path:
        return True
    if isinstance(a, float | np.floating):
        return bool(a == b) or (math.isnan(a) and math.isnan(b))
    path = (*_path, id(a))
    if isinstance(a, np.ndarray) and a.dtype != object:
        return a.dtype == b.dtype and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
    if isinstance(a, np.ndarray):
        alike = b.dtype == object and a.shape == b.shape
        return alike and all(deep_equal(x, y, path) for x, y in zip(a.flat, b.flat, strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(deep_equal(value, b[key], path) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(deep_equal(x, y, path) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of shape and values, whatever the dtypes, with NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def tensors_of(batch: TensorDict | None) -> dict[str, torch.Tensor]:
    """The tensors by name, none where there is no batch."""
    return {} if batch is None else {str(key): cast(torch.Tensor, value) for key, value in batch.items()}


def concat_tensors(batches: Sequence[TensorDict | None], cuts: Sequence[slice]) -> TensorDict | None:
    """Join the rows `cuts` of each batch; all batches must have the same keys, or all be None."""
    if batches[0] is None:
        return None
    parts = [tensors_of(batch) for batch in batches]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise KeyError(f"batches to concat have different tensors: {[sorted(part) for part in parts]}")
    joined = {key: join_rows([part[key][cut] for part, cut in zip(parts, cuts, strict=True)]) for key in parts[0]}
    num_rows = sum(len(range(len(batch))[cut]) for batch, cut in zip(batches, cuts, strict=True))  # pyrefly: ignore
    return TensorDict(joined, batch_size=(num_rows,), device=batches[0].device)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Put the tensors of the second into the first, in place; AssertionError for another size or a differing key."""
    size1, size2 = tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)
    assert size1 == size2, f"a union needs equal batch sizes, got {size1} and {size2}"
    held, added = tensors_of(tensor_dict1), tensors_of(tensor_dict2)
    for key in held.keys() & added.keys():
        assert tensors_equal(held[key], added[key]), f"tensors '{key}' differ in a union"
    return tensor_dict1.update({key: tensor for key, tensor in added.items() if key not in held})


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put the arrays of the second into the first, in place; AssertionError where a common key differs."""
    for key, array in tensor_dict2.items():
        if key in tensor_dict1:
            assert isinstance(array, np.ndarray), f"'{key}' is a {type(array).__name__}, not an array"
            assert isinstance(tensor_dict1[key], np.ndarray), f"'{key}' is not an array"
            assert deep_equal(tensor_dict1[key], array), f"arrays '{key}' differ in a union"
    tensor_dict1.update(tensor_dict2)
    return tensor_dict1


def union_meta(meta1: dict[str, object], meta2: Mapping[str, object]) -> dict[str, object]:
    """Put the entries of the second into the first, in place; AssertionError where a common key differs."""
    for key, value in meta2.items():
        assert key not in meta1 or _same(meta1[key], value), f"meta_info '{key}' differs in a union"
    meta1.update(meta2)
    return meta1


def concat_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """One meta_info out of several that agree; `metrics` (a dict or a list of dicts each) become a dict of lists."""
    merged, metrics = dict[str, object](), list[Mapping[str, object]]()
    for meta in metas:
        for key, value in meta.items():
            if key == "metrics":
                metrics.extend([] if value is None else value if isinstance(value, list) else [value])
            else:
                assert key not in merged or _same(merged[key], value), f"Conflicting values for meta_info key '{key}'"
                merged.setdefault(key, value)
    if metrics:
        merged["metrics"] = dict_of_lists(metrics)
    return merged


def _same(a: object, b: object) -> bool:
    has_rows = isinstance(a, np.ndarray | torch.Tensor) or isinstance(b, np.ndarray | torch.Tensor)
    return a is b or deep_equal(a, b) or (not has_rows and bool(a == b))


def dict_of_lists(rows: Sequence[Mapping[str, object]]) -> dict[str, list[Any]]:
    """Turn rows into columns; AssertionError where a row has a key that the first one has not."""
    columns: dict[str, list[object]] = {key: [] for key in rows[0]} if rows else {}
    for row in rows:
        for key, value in row.items():
            assert key in columns, f"key '{key}' is not in the first of the rows"
            columns[key].append(value)
    return columns


def concat_arrays(columns: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join the columns of several row sets; all must have the same keys."""
    return {key: np.concatenate(parts, axis=0) for key, parts in dict_of_lists(columns).items()}


def take_rows(tensor: Tensor | np.ndarray, rows: Tensor) -> Tensor | np.ndarray:
    """Copies of the rows at integer indices, negative ones counted from the end; IndexError outside."""
    if isinstance(tensor, np.ndarray):
        return tensor[rows.cpu().numpy()]
    rows = rows.to(tensor.device, torch.int64)
    rows = torch.where(rows < 0, rows + len(tensor), rows)
    return torch.index_select(tensor, 0, rows, out=_memory(len(rows), [tensor]))


def copy_rows(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return join_rows([tensor])


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts one after the other."""
    return torch.cat(list(parts), out=_memory(sum(map(len, parts)), parts))


def _memory(num_rows: int, parts: Sequence[Tensor]) -> Tensor | None:
    """Memory for `num_rows` rows; None where torch allocates it: few bytes, parts that differ, GPUs, gradients."""
    shape, dtype = (num_rows, *parts[0].shape[1:]), parts[0].dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    plain = all(part.device.type == "cpu" and not part.requires_grad for part in parts)
    if num_bytes < HUGE_BYTES or not plain or any((p.dtype, p.shape[1:]) != (dtype, shape[1:]) for p in parts):
        return None
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
