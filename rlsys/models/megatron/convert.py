"""Weights between Hugging Face checkpoints and the parameters of Megatron ranks, slice by slice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlsys.models.hf import SafetensorsDir, TensorSource, check_names
from rlsys.models.megatron.rules import extents
from rlsys.types import Shard
from rlsys.utils.errors import CheckpointError


class LocalTensors(Protocol):
    """Where a rank's local tensors are read from, by local name."""

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor: ...


def load_hf(
    path: Path | str,
    shards: Sequence[Shard],
    local_tensors: Mapping[str, Tensor],
    *,
    full_shapes: Mapping[str, Sequence[int]] | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Fill a rank's tensors, in place and in their own dtype, from the safetensors files of a model directory.

    Only the rank's slices are read. Elements no shard speaks of, padding of the vocabulary, become zero.
    CheckpointError, before anything is changed, unless the files hold exactly `full_shapes` (as `Family.hf_shapes`)
    besides the names in `ignore` and the local tensors are exactly those of the shards.
    """
    load_from(SafetensorsDir(Path(path)), shards, local_tensors, full_shapes=full_shapes, ignore=ignore)


def load_from(
    source: TensorSource,
    shards: Sequence[Shard],
    local_tensors: Mapping[str, Tensor],
    *,
    full_shapes: Mapping[str, Sequence[int]] | None = None,
    ignore: Collection[str] = (),
) -> None:
    """`load_hf` from any source of HF tensors."""
    if full_shapes is not None:
        check_names(full_shapes, source, aliases=ignore)
    _check_local(shards, local_tensors)
    _check_source(shards, source)
    by_local = defaultdict(list)
    for shard in shards:
        by_local[shard.local].append(shard)
    with torch.no_grad():
        for name, own in by_local.items():
            fill(local_tensors[name].detach(), own, source)


def fill(target: Tensor, shards: Sequence[Shard], source: TensorSource) -> None:
    """Fill one local tensor from its shards' boxes; what they do not cover becomes zero."""
    if sum(prod(shard.box.shape) for shard in shards) < target.numel():
        target.zero_()
    for shard in shards:
        box = shard.box
        view(target, shard.local_start, box.shape).copy_(source.read(box.tensor, box.start, box.shape))


def view(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The box of `tensor` of the given shape from `start`."""
    return tensor[tuple(slice(at, at + n) for at, n in zip(start, shape, strict=True))]


def full_tensors(
    full_shapes: Mapping[str, Sequence[int]], ranks: Sequence[tuple[Sequence[Shard], LocalTensors]]
) -> Iterator[tuple[str, Tensor]]:
    """Whole HF tensors, one at a time in the order of `full_shapes`, from the ranks' local tensors.

    A box that several ranks hold is read from the first. CheckpointError for elements no rank holds.
    """
    holders: dict[str, dict[tuple[int, ...], tuple[Shard, LocalTensors]]] = defaultdict(dict)
    for shards, local in ranks:
        for shard in shards:
            holders[shard.box.tensor].setdefault((*shard.box.start, *shard.box.shape), (shard, local))
    for name, shape in full_shapes.items():
        yield name, _assembled(name, tuple(shape), [*holders[name].values()])


def _assembled(name: str, shape: tuple[int, ...], boxes: Sequence[tuple[Shard, LocalTensors]]) -> Tensor:
    held = sum(prod(shard.box.shape) for shard, _ in boxes)
    if held != prod(shape):
        raise CheckpointError(f"{name}: the ranks hold {held} of its {prod(shape)} elements")
    full: Tensor | None = None
    for shard, local in boxes:
        part = local.read(shard.local, shard.local_start, shard.box.shape)
        if full is None:
            full = torch.empty(shape, dtype=part.dtype, device=part.device)
        if part.dtype != full.dtype:
            raise CheckpointError(f"{name} is {full.dtype} in one rank and {part.dtype} in another ({shard.local})")
        view(full, shard.box.start, shard.box.shape).copy_(part)
    assert full is not None
    return full


def _check_local(shards: Sequence[Shard], local_tensors: Mapping[str, Tensor]) -> None:
    needed = extents(shards)
    lacking = sorted(needed.keys() - local_tensors.keys())
    unknown = sorted(local_tensors.keys() - needed.keys())
    small = [
        f"{name} is {tuple(local_tensors[name].shape)} and should hold {extent}"
        for name, extent in needed.items()
        if name in local_tensors and not _fits(extent, local_tensors[name].shape)
    ]
    parts = [
        f"the model lacks {len(lacking)} parameters of the table ({', '.join(lacking[:3])})" if lacking else "",
        f"the table lacks {len(unknown)} parameters of the model ({', '.join(unknown[:3])})" if unknown else "",
        f"{len(small)} shapes differ ({'; '.join(small[:3])})" if small else "",
    ]
    if any(parts):
        raise CheckpointError("; ".join(filter(None, parts)))


def _fits(extent: Sequence[int], shape: Sequence[int]) -> bool:
    """Padding is only at the end of the first dimension, and less than a row a part: other sizes are equal."""
    return len(extent) == len(shape) and extent[0] <= shape[0] and tuple(extent[1:]) == tuple(shape[1:])


def _check_source(shards: Sequence[Shard], source: TensorSource) -> None:
    names = set(source.names())
    missing = sorted({shard.box.tensor for shard in shards} - names)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors ({', '.join(missing[:3])})")
    shapes = {name: source.shape(name) for name in {shard.box.tensor for shard in shards}}
    for shard in shards:
        box, full = shard.box, shapes[shard.box.tensor]
        if len(box.shape) != len(full) or any(a + n > size for a, n, size in zip(box.start, box.shape, full)):
            raise CheckpointError(
                f"{box.tensor} is {tuple(full)} in the checkpoint, which has no {box.start}+{box.shape}"
            )
