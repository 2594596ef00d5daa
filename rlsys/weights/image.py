"""Whole tensors side by side in memory that several processes map: written box by box, read box by box."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import box_checksum
from rlsys.weights.layout import check_layouts, dtype_of, element_bytes, shard_view, view_of, whole_box
from rlsys.weights.plan import Copy, Plan, make_plan, resolve_names


@dataclass(frozen=True)
class ImageTensor:
    """A whole tensor in an image, `offset` bytes from its start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * element_bytes(self.dtype)


@dataclass(frozen=True)
class ImagePlan:
    """The tensors of an image, who writes what, and under which name each rollout tensor is in it."""

    tensors: tuple[ImageTensor, ...]
    num_bytes: int
    plan: Plan
    names: Mapping[str, str]


def plan_image(
    sources: Sequence[WeightLayout],
    destinations: Sequence[WeightLayout],
    *,
    start_bytes: int = 0,
    align_bytes: int = 64,
) -> ImagePlan:
    """Every tensor that an engine wants, whole, in the engines' dtype (the first engine's where they differ).

    The widest dtypes come first, so that with `align_bytes=1` there are no holes and elements are still aligned.
    Raises WeightTransferError when the layouts do not fit each other.
    """
    check_layouts(sources, "trainer")
    check_layouts(destinations, "rollout")
    names = resolve_names(sources, destinations)
    dtypes: dict[str, str] = {}
    for layout in destinations:
        for name, dtype in layout.dtypes.items():
            dtypes.setdefault(names[name], dtype)
    shapes = {name: tuple(shape) for layout in sources for name, shape in layout.full_shapes.items()}
    tensors, end = [], start_bytes
    for name in sorted(dtypes, key=lambda name: (-element_bytes(dtypes[name]), name)):
        tensors.append(ImageTensor(name, shapes[name], dtypes[name], end))
        end = -(-(end + tensors[-1].num_bytes) // align_bytes) * align_bytes
    shards = tuple(Shard(whole_box(t.name, t.shape), t.name, (0,) * len(t.shape)) for t in tensors)
    image = WeightLayout(0, "", shards, {t.name: t.shape for t in tensors}, dtypes)
    return ImagePlan(tuple(tensors), end, make_plan(sources, [image]), names)


def tensors_in(memory: Tensor, entries: Iterable[ImageTensor]) -> dict[str, Tensor]:
    """The tensors of an image in its bytes."""
    return {
        entry.name: memory[entry.offset : entry.offset + entry.num_bytes].view(dtype_of(entry.dtype)).view(entry.shape)
        for entry in entries
    }


@torch.no_grad()
def write_boxes(writes: Iterable[Copy], local: Mapping[str, Tensor], image: Mapping[str, Tensor]) -> dict[str, int]:
    """Copy one rank's boxes into an image; the checksums of what was written, by tensor."""
    sums: dict[str, int] = {}
    for copy in writes:
        held = Shard(Box(copy.tensor, copy.start, copy.shape), copy.source_local, copy.source_start)
        target = view_of(image[copy.tensor], copy.start, copy.shape)
        target.copy_(shard_view(local, held))
        sums[copy.tensor] = sums.get(copy.tensor, 0) + box_checksum(target, copy.start, image[copy.tensor].shape)
    return sums


@torch.no_grad()
def read_boxes(
    layout: WeightLayout,
    local: Mapping[str, Tensor],
    image: Mapping[str, Tensor],
    names: Mapping[str, str],
    published: Mapping[str, int],
) -> int:
    """Copy what a layout holds out of an image and check it; returns its bytes.

    Whole shards of the same dtype are checked where they arrived, else the image is that they come from.
    """
    checked, num_bytes = set[str](), 0
    for shard in layout.shards:
        name = names[shard.box.tensor]
        whole, target = image[name], shard_view(local, shard)
        target.copy_(view_of(whole, shard.box.start, shard.box.shape))
        proof = target if target.shape == whole.shape and target.dtype == whole.dtype else whole
        if proof is target or name not in checked:
            if box_checksum(proof, (0,) * whole.ndim, whole.shape) != published[name]:
                raise WeightTransferError(f"tensor '{name}' that arrived is not the one that the trainer wrote")
            checked.add(name)
        num_bytes += target.nbytes
    return num_bytes


def largest_differences(
    layout: WeightLayout, local: Mapping[str, Tensor], image: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, float]:
    """The largest absolute difference between a layout's elements and the image, by rollout tensor."""
    largest: dict[str, float] = {}
    for shard in layout.shards:
        source = view_of(image[names[shard.box.tensor]], shard.box.start, shard.box.shape)
        apart = (shard_view(local, shard).to(source.device, torch.float64) - source.double()).abs()
        name = shard.box.tensor
        largest[name] = max(largest.get(name, 0.0), float(apart.max()) if apart.numel() else 0.0)
    return largest
