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
        if size > 1 and length % (2 * size):
            raise ValueError(
                f"{size} ranks cannot share a sequence of {length} tokens: pad it to a multiple of {2 * size}"
            )
        if size == 1:
            yield TokenSpan(first, first, first + length)
        else:
            chunk = length // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
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
    here = torch.full((sum(lengths),), -1)
    mine = own_tokens(lengths, rank, size)
    here[mine] = torch.arange(len(mine))
    own = here.to(places.device)[places]
    numbers = (own >= 0).nonzero()[:, 0]
    return numbers, own[numbers]
