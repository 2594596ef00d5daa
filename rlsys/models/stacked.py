"""Parameters that transformers stacks in memory and saves apart: the experts of a layer, each with its own name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STACK_DIMS = 3


@dataclass(frozen=True)
class Part:
    """A saved tensor (rows, width): the rows from `start` on of the parameter `stack`, seen as (all rows, width)."""

    stack: str
    start: int
    shape: tuple[int, int]


def flat_stack(tensor: Tensor) -> Tensor:
    """A stack (E, rows, width) as (E * rows, width), sharing its memory; other tensors as they are."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.ndim == STACK_DIMS else tensor


def saved_parts(model: Any) -> dict[str, Part]:
    """Every saved tensor that is a part of a stack, by its saved name.

    Asked of transformers itself: numbered rows go through the conversion that it saves with. A stack whose parts are
    not runs of rows (a transposed one) is left whole, under its own name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Part] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim != STACK_DIMS:
            continue
        experts, rows, width = parameter.shape
        numbers = torch.arange(experts * rows).view(experts, rows, 1)
        saved = revert_weight_conversion(model, {name: numbers})
        runs = {key: part.flatten() for key, part in saved.items()}
        if name not in saved and all(torch.equal(run, torch.arange(len(run)) + run[0]) for run in runs.values()):
            found |= {key: Part(name, int(run[0]), (len(run), width)) for key, run in runs.items()}
    return found
