"""Exact causal attention over packed sequences, as an attention implementation of transformers named `ATTENTION`.

A pack is one row (1, tokens) holding sequences one after another; no token sees another sequence. On CUDA in half
precision the variable-length flash kernel of torch runs; otherwise each sequence is attended on its own, which costs no
masked-out work (a dense block-diagonal mask costs the square of the whole pack) and gives each sequence the same digits
whatever it is packed with.

Under Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509) every rank of the group of size S holds a
slice of the tokens with all heads between attentions; inside attention all tokens with a slice of the heads.
"""

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import AttentionInterface

from rlsys.models.packing import sequence_ends
from rlsys.utils.errors import ConfigError

ATTENTION = "rlsys_packed"
_UNSUPPORTED = ("softcap", "position_bias")


class PackReachedError(Exception):
    """A pack has reached the attention of a model on the meta device, which computes nothing."""


class Packing:
    """Where the sequences of a pack lie; handed to every attention layer. `group` is the sequence-parallel group."""

    def __init__(self, lengths: Sequence[int], device: torch.device, group: ProcessGroup | None = None) -> None:
        self.lengths = tuple(lengths)
        self.max_length = max(self.lengths)
        self.group = group
        self.cu_seq_lens = sequence_ends(self.lengths, device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend within each sequence of `packing`: query (1, heads, tokens, dim) -> (1, tokens, heads, dim).

    `s_aux` (heads,) are sinks: logits of a key without a value. ConfigError for what would otherwise be left out:
    dropout, logit caps, biases, or the packing itself, which some models do not pass on.
    """
    odd = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if packing is None or odd or dropout or attention_mask is not None:
        what = odd or ["packing" if packing is None else "dropout" if dropout else "attention_mask"]
        raise ConfigError(f"packed rows do not go with the attention's {what[0]}: set use_remove_padding=false")
    if query.is_meta:
        raise PackReachedError
    group = packing.group
    if group is not None:
        repeats = kv_repeats(query.shape[1], key.shape[1], dist.get_world_size(group))
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        query, key, value = (_exchange(x, group, gather=2, split=1) for x in (query, key, value))
        s_aux = None if s_aux is None else s_aux.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    if s_aux is None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        out = _varlen(query, key, value, packing, scaling, sliding_window)
    else:
        parts = zip(*(x.split(packing.lengths, dim=2) for x in (query, key, value)), strict=True)
        out = torch.cat([causal_attention(q, k, v, scaling, sliding_window, s_aux) for q, k, v in parts], dim=2)
    if group is not None:
        out = _exchange(out, group, gather=1, split=2)
    return out.transpose(1, 2).contiguous(), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:  # releases without it take grouped heads unasked
        options["enable_gqa"] = True
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    ends, longest = packing.cu_seq_lens, packing.max_length
    out = varlen_attn(q, k, v, ends, ends, longest, longest, **options)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention of a sequence's last t tokens (..., heads, t, dim) to those up to their own (..., heads, T, dim).

    Each sees the last `window` of them; `sinks` (heads,) are logits of a key without a value.
    """
    mask = None
    (heads, last), size = query.shape[-3:-1], key.shape[-2]
    if last < size or sinks is not None or (window is not None and window < size):
        at = torch.arange(size, device=query.device)
        behind = at[size - last :, None] - at
        mask = (behind >= 0) & (behind < (window or size))
    if sinks is not None and mask is not None:
        key, value = (F.pad(x, (0, 0, 1, 0)) for x in (key, value))
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        mask = torch.cat([sinks.to(query.dtype).view(-1, 1, 1).expand(-1, last, 1), bias.expand(heads, -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != key.shape[-3]
    )


AttentionInterface.register(ATTENTION, packed_attention)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum of the ranks' tensors where every rank continues with the same computation; passes its gradient unchanged."""
    return _SumOver.apply(x, group)


def kv_repeats(num_heads: int, num_kv_heads: int, group_size: int) -> int:
    """How often each key/value head is repeated so that the heads divide over the group; ConfigError if they cannot."""
    if num_heads % group_size:
        how = "choose ulysses_sequence_parallel_size among its divisors"
        why = f"needs a number of attention heads divisible by it, the model has {num_heads}: {how}"
        raise ConfigError(f"sequence parallelism over {group_size} ranks {why}")
    return math.lcm(num_kv_heads, group_size) // num_kv_heads


def _exchange(x: Tensor, group: ProcessGroup, *, gather: int, split: int) -> Tensor:
    """(1, heads, tokens/S, dim) -> (1, heads/S, tokens, dim), where tokens are gathered and heads split, and back."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim=split))
    return torch.cat(all_to_all_single_autograd(parts, None, None, group).unbind(0), dim=gather)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
