"""Exchanges of Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509), differentiable.

Between attentions every rank of the group of size S holds a slice of the tokens with all heads; inside attention all
tokens with a slice of the heads. Shapes are (1, heads, tokens, dim).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd

from rlsys.utils.errors import ConfigError


def heads_to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """(1, heads/S, tokens, dim) -> (1, heads, tokens/S, dim): what leaves attention."""
    return _exchange(x, group, 1, 2)


def tokens_to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """(1, heads, tokens/S, dim) -> (1, heads/S, tokens, dim): what enters attention."""
    return _exchange(x, group, 2, 1)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum of the ranks' tensors where every rank continues with the same computation; passes its gradient unchanged."""
    return _SumOver.apply(x, group)


def kv_repeats(num_heads: int, num_kv_heads: int, group_size: int) -> int:
    """How often each key/value head is repeated so that the heads divide over the group; ConfigError if they cannot."""
    if num_heads % group_size:
        raise ConfigError(
            f"sequence parallelism over {group_size} ranks needs a number of attention heads divisible by it, "
            f"the model has {num_heads}: choose ulysses_sequence_parallel_size among its divisors"
        )
    return math.lcm(num_kv_heads, group_size) // num_kv_heads


def _exchange(x: Tensor, group: ProcessGroup, gather_dim: int, split_dim: int) -> Tensor:
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim=split_dim))
    received = all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(received.unbind(0), dim=gather_dim)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
