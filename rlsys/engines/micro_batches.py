"""Splitting one rank's rows into micro-batches, as many on every rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsys.batching import micro_batches
from rlsys.config.schema.types import MicroBatches as MicroBatches
from rlsys.models.packing import TokenRows, empty_rows, token_rows
from rlsys.models.vision import VisionModel, pack_images
from rlsys.protocol import DataProto, images_of


@dataclass(frozen=True)
class Pack:
    """One micro-batch: its row numbers (None where only other ranks have rows left) and its packed tokens."""

    index: Tensor | None
    tokens: TokenRows


def split_rows(
    lengths: Sequence[int], size: MicroBatches, *, agree: Callable[[int], int], num_sharing: int = 1
) -> list[list[int]]:
    """Row numbers of each micro-batch, on every rank as many as `agree` returns (the maximum); the last may be empty.

    `num_sharing` ranks compute each row together, so a token budget counts for each. ValueError on all ranks if a row
    alone is over the budget.
    """
    if size.max_tokens is not None:
        return [part.tolist() for part in micro_batches(lengths, size.max_tokens * num_sharing, agree=agree)]
    step = size.rows or max(1, len(lengths))
    fixed = [list(range(at, min(at + step, len(lengths)))) for at in range(0, len(lengths), step)]
    return fixed + [[]] * (agree(len(fixed)) - len(fixed))


def packs_of(batch: DataProto, parts: Sequence[Sequence[int]], vision: VisionModel | None) -> Iterator[Pack]:
    """The packs of these row numbers, with their images where there is a model that takes some."""
    images = images_of(batch)
    for part in parts:
        index = torch.tensor(part) if part else None
        tokens = empty_rows(torch.device("cpu")) if index is None else token_rows(batch.tensors[index])
        if vision is not None:
            own = [images[row] for row in part if batch.tensors["attention_mask"][row].any()] or [()]
            packed, positions = pack_images(vision.config, tokens.token_ids, tokens.lengths, own)
            tokens = replace(tokens, images=packed, position_ids=positions)
        yield Pack(index, tokens)
