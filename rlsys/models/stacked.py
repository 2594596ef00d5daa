"""Tensors that transformers saves under other names than those of the model: stacked experts above all."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsys.types import Box, Shapes, Shard

STACK_DIMS = 3
Parts = Mapping[str, "StackRows"]
"""Saved tensors that are parts of another one, by their own names."""
Stacks = Mapping[str, Parts]
"""The parts of each held tensor that is saved under other names, by its name."""


@dataclass(frozen=True)
class StackRows:
    """A saved tensor: `num_rows` rows from `start` on of the held one, whose stack counts as (all rows, width).

    `is_whole`: it is that tensor under another name, in its shape.
    """

    start: int
    num_rows: int
    is_whole: bool = False


def saved_aliases(shared: Mapping[str, str], stacks: Stacks) -> dict[str, str]:
    """Names of tensors that are held under other names, which are given as they are saved."""
    return {name: next(iter(stacks.get(held, (held,)))) for name, held in shared.items()}


def saved_shapes(name: str, shape: Sequence[int], stacks: Stacks) -> Shapes:
    """The tensors that a held one of this shape is saved as, with their shapes."""
    held, parts = tuple(shape), stacks.get(name, {}).items()
    width = held[-1:] if len(held) > 1 else ()
    return {saved: held if part.is_whole else (part.num_rows, *width) for saved, part in parts} or {name: held}


def shards_of(parts: Parts, held: Box, shape: Sequence[int]) -> Iterator[Shard]:
    """A rank's part `held` of a stack of this shape (its entries, or rows of each) as boxes of its `parts`."""
    is_stack = len(held.shape) == STACK_DIMS
    entries = range(held.start[0], held.start[0] + held.shape[0]) if is_stack else range(1)
    axis = 1 if is_stack else 0
    rows, above, own = shape[axis], held.start[axis], held.shape[axis]
    width = held.shape[-1:] if len(held.shape) > 1 else ()
    zeros = (0,) * len(width)
    for saved, part in parts.items():
        if part.is_whole and held.shape[0]:
            yield Shard(Box(saved, held.start, held.shape), held.tensor, (0,) * len(held.shape))
            continue
        end = part.start + part.num_rows
        for entry in range(max(entries.start, part.start // rows), min(entries.stop, -(-end // rows))):
            begin = entry * rows + above
            low, high = max(begin, part.start), min(begin + own, end)
            if low < high:
                place = (entry - entries.start, low - begin) if is_stack else (low - begin,)
                yield Shard(Box(saved, (low - part.start, *zeros), (high - low, *width)), held.tensor, (*place, *zeros))


def as_saved(name: str, tensor: Tensor, stacks: Stacks) -> dict[str, Tensor]:
    """The tensors that a held one is saved as, sharing its memory."""
    rows, parts = tensor.flatten(0, -2) if tensor.ndim == STACK_DIMS else tensor, stacks.get(name, {}).items()
    return {
        saved: tensor if part.is_whole else rows[part.start : part.start + part.num_rows] for saved, part in parts
    } or {name: tensor}


def saved_stacks(model: Any) -> Stacks:
    """The tensors of a model that are saved under other names.

    Learned from transformers itself: numbered rows are passed through the conversion that it saves with. A result that
    is not a run of rows of one tensor (a transposed stack) is left under its own name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict(keep_vars=True)
    held = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name in state and t.ndim}
    names, starts, coded, count = list(held), [], {}, 0
    for name, tensor in held.items():
        rows = tensor.shape if tensor.ndim == 1 else (*tensor.shape[:-1], 1)
        starts.append(count)
        coded[name] = torch.arange(torch.Size(rows).numel()).view(rows) + count
        count += coded[name].numel()
    stacks: dict[str, dict[str, StackRows]] = {}
    for saved, part in revert_weight_conversion(model, coded).items():
        run = part.flatten()
        at = bisect_right(starts, int(run[0])) - 1
        source, start = names[at], int(run[0]) - starts[at]
        is_run = torch.equal(run, torch.arange(len(run)) + run[0]) and start + len(run) <= coded[source].numel()
        if saved != source and is_run:
            is_whole = start == 0 and part.shape == coded[source].shape
            stacks.setdefault(source, {})[saved] = StackRows(start, len(run), is_whole)
    return stacks
