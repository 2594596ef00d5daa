"""Tensors that transformers saves under other names than it holds them by: stacked experts above all."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STACK_DIMS = 3


@dataclass(frozen=True)
class Part:
    """A saved tensor: `num_rows` rows from `start` on of the tensor `held`, whose stack counts as (all rows, width)."""

    held: str
    start: int
    num_rows: int


def part_of(tensor: Tensor, part: Part) -> Tensor:
    """The saved tensor inside the held one, sharing its memory."""
    flat = tensor.view(-1, tensor.shape[-1]) if tensor.ndim == STACK_DIMS else tensor
    return flat[part.start : part.start + part.num_rows]


def saved_parts(model: Any) -> dict[str, Part]:
    """The saved tensors that are held under another name, by the name they are saved by.

    Asked of transformers itself: numbered rows go through the conversion that it saves with. What comes out as no run
    of rows of one tensor (a transposed stack) is left under its own name.
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
    found: dict[str, Part] = {}
    for saved, part in revert_weight_conversion(model, coded).items():
        run = part.flatten()
        at = bisect_right(starts, int(run[0])) - 1
        source, start = names[at], int(run[0]) - starts[at]
        is_run = torch.equal(run, torch.arange(len(run)) + run[0]) and start + len(run) <= coded[source].numel()
        if saved != source and is_run:
            found[saved] = Part(source, start, len(run))
    return found
