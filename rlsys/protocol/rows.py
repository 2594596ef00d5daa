"""Whole-batch helpers, mostly verl's: padding to a divisor, folding the batch dimension, collating rows, lengths."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlsys.protocol.columns import dict_of_lists, object_rows, tensors_of
from rlsys.protocol.data import DataProto, DataProtoItem


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows of `data`, cyclically, until its length divides; returns it and how many were added."""
    assert isinstance(data, DataProto), "data must be a DataProto"
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    return data[:-pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(B, ...) -> (new_batch_size, B // new_batch_size, ...) for every column."""
    assert len(data) % new_batch_size == 0, f"{len(data)} rows do not fold into {new_batch_size}"
    per_row = len(data) // max(new_batch_size, 1)
    return _reshape_rows(data, lambda values: values.reshape(new_batch_size, per_row, *values.shape[1:]))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Make one batch dimension out of the first `batch_dims` of every column."""
    return _reshape_rows(
        data, lambda values: values.reshape(math.prod(values.shape[:batch_dims]), *values.shape[batch_dims:])
    )


def _reshape_rows(data: DataProto, reshape: Callable[[Any], Any]) -> DataProto:
    tensors = {key: reshape(tensor) for key, tensor in tensors_of(data.batch).items()}
    arrays = {key: reshape(array) for key, array in data.non_tensor_batch.items()}
    folded = type(data).from_dict(tensors, arrays, data.meta_info)
    if folded.batch is not None and data.batch is not None and data.batch.device is not None:
        folded.to(data.batch.device)
    return folded


def column(batch: DataProto, name: str) -> Tensor:
    """A tensor of the batch; ValueError listing the batch's columns if it is missing."""
    tensors = tensors_of(batch.batch)
    if name not in tensors:
        raise ValueError(f"the batch has no '{name}', only {', '.join(sorted(tensors))}")
    return tensors[name]


def compute_response_mask(data: DataProto) -> Tensor:
    """The part of the attention mask (B, P+R) that belongs to `responses` (B, R), tool results included."""
    return column(data, "attention_mask")[:, -column(data, "responses").shape[1] :]


def response_lengths(data: DataProto) -> Tensor:
    """Tokens of each response (B,), those of tool results included."""
    return compute_response_mask(data).sum(-1)


def pad_rows(rows: Sequence[Sequence[float]], *, value: float, left: bool = False, length: int | None = None) -> Tensor:
    """(B, length), float32 where `value` is a float, else int64, padded on the right, or the `left`; the longest row
    sets a missing length.

    Raises ValueError for a row that is longer.
    """
    longest = max(map(len, rows), default=0)
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"a row of {longest} tokens does not fit into {length}")
    dtype, kind = (torch.float32, np.float64) if isinstance(value, float) else (torch.int64, np.int64)
    columns = torch.arange(length).flip(0) if left else torch.arange(length)
    padded = torch.full((len(rows), length), value, dtype=dtype)
    flat = np.fromiter(chain.from_iterable(rows), kind)
    padded[columns < torch.tensor([*map(len, rows)])[:, None]] = torch.from_numpy(flat).to(dtype)
    return padded


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions of the real tokens, 0 at pads."""
    return (attention_mask.cumsum(-1) - 1) * attention_mask


def row_tensors(prompts: Tensor, prompt_mask: Tensor, responses: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """The tensors of generated rows that follow from prompts (B, P) and responses (B, R), 1 in the masks on tokens."""
    attention_mask = torch.cat([prompt_mask, response_mask], dim=-1)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=-1),
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask),
    }


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Rows out of single items, their objects in object arrays."""
    items = cast(list[Tensor], [item.batch for item in x])
    batch = None if x[0].batch is None else cast(TensorDict, torch.stack(items).contiguous())
    columns = dict_of_lists([item.non_tensor_batch for item in x])
    return DataProto(batch=batch, non_tensor_batch={key: object_rows(values) for key, values in columns.items()})
