"""Which tokens of a pack a rank of context parallelism holds, and how the ranks' parts become whole again.

Every sequence of a pack is cut into 2 S chunks, where S ranks share it, and rank r holds chunks r and 2 S - 1 - r of
each (the order of Megatron-Core and Transformer Engine): causal attention is as much work on every rank. T tokens of
the pack, T / S on a rank.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlsys.models.packing import to_device


class TokenSpan(NamedTuple):
    """Tokens `start` to `stop` of a pack, of the sequence that begins at token `first`."""

    first: int
    start: int
    stop: int


def pack_multiple(each: int, size: int) -> int:
    """What the tokens of a pack divide by, where each of `size` ranks has a multiple of `each`, in two equal chunks of
    every sequence."""
    return size * math.lcm(each, 2) if size > 1 else each


def own_spans(lengths: Sequence[int], rank: int, size: int) -> Iterator[TokenSpan]:
    """What `rank` holds, in its order; ValueError for a length that 2 `size` does not divide."""
    first = 0
    for length in lengths:
        chunk, rest = divmod(length, 2 * size) if size > 1 else (length, 0)
        if rest:
            raise ValueError(f"{size} ranks cannot share a row of {length} tokens: pad it to a multiple of {2 * size}")
        for number in (rank, 2 * size - 1 - rank) if size > 1 else (0,):
            yield TokenSpan(first, first + number * chunk, first + (number + 1) * chunk)
        first += length


def own_tokens(lengths: Sequence[int], rank: int, size: int) -> Tensor:
    """Places in the pack (T / size,) of the tokens that `rank` holds, in its order."""
    return torch.cat([torch.arange(span.start, span.stop) for span in own_spans(lengths, rank, size)])


def whole_order(lengths: Sequence[int], size: int) -> Tensor:
    """Where each token of the pack (T,) is in the ranks' parts, one after another."""
    return torch.cat([own_tokens(lengths, rank, size) for rank in range(size)]).argsort()


def own_among(places: Tensor, lengths: Sequence[int], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Which of the tokens at `places` of the pack (M,) a rank holds, as numbers of `places`, and where it has them."""
    share = sum(lengths) // size
    here = whole_order(lengths, size)[places] - rank * share
    numbers = ((here >= 0) & (here < share)).nonzero()[:, 0]
    return numbers, here[numbers]


class PackShare:
    """What a rank holds of a pack, for layers that would have to ask the device for it: its spans, and on the device
    the places of its tokens in the pack and in their sequences, and `whole_order` where there are several ranks."""

    def __init__(self, lengths: Sequence[int], rank: int, size: int, device: torch.device) -> None:
        self.total, self.spans = sum(lengths), list(own_spans(lengths, rank, size))
        places = [torch.arange(span.start, span.stop) - torch.tensor([[0], [span.first]]) for span in self.spans]
        self.tokens, self.positions = to_device(torch.cat(places, dim=1), device)
        self.order = to_device(whole_order(lengths, size), device) if size > 1 else None
