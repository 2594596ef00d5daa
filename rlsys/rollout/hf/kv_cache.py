"""A key-value cache in which all running rows share one current column.

Every row's tokens end at the same column, so one step writes one column of every layer, whatever the prompts' lengths,
and rows come and go by copying single rows. Letters: N rows, H key-value heads, C columns, D head size.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

ATTENTION = "rlsys_grouped"


class Window:
    """What the next forward pass writes and reads: `rows`, columns `write`, columns `read`; and the buffers' size."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.num_rows, self.num_columns = num_rows, num_columns
        self.rows = self.write = self.read = slice(0, 0)


class ColumnLayer(CacheLayerMixin):
    """Keys and values (N, H, C, D) of one layer, seen through a window that all layers share."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window
        self.buffers: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.buffers = [self._empty(key_states), self._empty(value_states)]
        self.is_initialized = True

    def _empty(self, like: Tensor) -> Tensor:
        """Zeros, because a masked column still enters the products: it must be finite."""
        return like.new_zeros(self.window.num_rows, like.shape[1], self.window.num_columns, like.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        (keys, values), window = self.buffers, self.window
        keys[window.rows, :, window.write] = key_states
        values[window.rows, :, window.write] = value_states
        return keys[window.rows, :, window.read], values[window.rows, :, window.read]

    def reallocate(self, rows: int, source: slice, start: int) -> None:
        """New buffers of the window's size, with columns `source` of the first `rows` rows from column `start` on."""
        for i, old in enumerate(self.buffers):
            new = self._empty(old)
            new[:rows, :, start : start + source.stop - source.start] = old[:rows, :, source]
            self.buffers[i] = new

    def copy_rows(self, sources: Tensor, targets: slice, columns: slice) -> None:
        for buffer in self.buffers:
            buffer[targets, :, columns] = buffer[:, :, columns].index_select(0, sources)

    def get_seq_length(self) -> int:
        return self.window.write.start - self.window.read.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.read.stop - self.window.read.start, 0

    def get_max_length(self) -> int:
        return self.window.num_columns

    get_max_cache_shape = get_max_length


class ColumnCache(Cache):
    """The cache of all layers, with the shared current column `column` (the next one to be written)."""

    def __init__(self, num_layers: int, *, num_rows: int = 0, num_columns: int = 0) -> None:
        self.window = Window(num_rows, num_columns)
        self.columns = [ColumnLayer(self.window) for _ in range(num_layers)]
        super().__init__(layers=list(self.columns))
        self.column = 0

    def look(self, rows: slice, read: slice, write: slice) -> "ColumnCache":
        """Set what the next forward pass sees."""
        self.window.rows, self.window.read, self.window.write = rows, read, write
        return self

    def relayout(self, rows: int, *, first: int, column: int, num_rows: int, num_columns: int) -> None:
        """New buffers; columns [first, self.column) of the first `rows` rows come to end before `column`."""
        source = slice(first, self.column)
        self.window.num_rows, self.window.num_columns, self.column = num_rows, num_columns, column
        for layer in self.columns:
            layer.reallocate(rows, source, column - (source.stop - source.start))

    def copy_rows(self, sources: Tensor, targets: slice, first: int) -> None:
        """Copy the rows `sources` to the rows `targets`, from column `first` to the current one."""
        for layer in self.columns:
            layer.copy_rows(sources, targets, slice(first, self.column))


def causal_mask(starts: Tensor, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
    """Additive mask (N, 1, Q, K): a query column sees the key columns from its row's start to itself.

    What is added to the score of a hidden column is far below any score, and far from overflow.
    """
    key = torch.arange(keys.start, keys.stop, device=starts.device)
    query = torch.arange(queries.start, queries.stop, device=starts.device)
    seen = (key >= starts[:, None, None]) & (key <= query[:, None])
    return torch.where(seen, 0.0, torch.finfo(dtype).min / 2).to(dtype)[:, None]


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    first_columns: Sequence[int] = (),
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that never repeats keys and values for grouped queries.

    The signature is the one that transformers calls. The queries of one group are laid behind one another, so that they
    share one product with their keys; only for prompts on CPU torch's own grouping is faster. With `first_columns` (N)
    each row's product begins there.
    """
    num_rows, num_heads, num_queries, size = query.shape
    groups = num_heads // key.shape[1]
    if attention_mask is None or (num_queries > 1 and (groups == 1 or query.device.type == "cpu")):
        causal = attention_mask is None and num_queries > 1
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous(), None
    mask = attention_mask.repeat(1, 1, groups, 1) if num_queries > 1 else attention_mask
    stacked = query.reshape(num_rows, key.shape[1], groups * num_queries, size)
    attend = partial(scaled_dot_product_attention, scale=scaling)
    if first_columns:
        rows = [(slice(row, row + 1), slice(first, None)) for row, first in enumerate(first_columns)]
        out = torch.cat([attend(stacked[n], key[n, :, c], value[n, :, c]) for n, c in rows])
    else:
        out = attend(stacked, key, value, mask)
    return out.reshape(num_rows, num_heads, num_queries, value.shape[3]).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
