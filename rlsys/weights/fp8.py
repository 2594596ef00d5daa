"""A trainer's weights for engines that serve FP8: float8 elements, and a float32 scale for each block of 128 x 128.

The largest magnitude of each block is agreed among the trainer's ranks, so that each quantises only what it holds,
also of blocks that its shards cut. Arithmetic as of vLLM's `per_block_cast_to_fp8`, of weights rounded to bfloat16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlsys.interfaces import TrainEngine
from rlsys.models.fp8 import BLOCK, FP8, FP8_NAME, SCALE, scale_shape
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.boxes import slices
from rlsys.weights.layout import device_of, shard_view, whole_box

SMALLEST, LARGEST = 1e-4, torch.finfo(FP8).max
"""Of magnitudes: of a block of zeros, and of an element."""


class Fp8Weights:
    """What a trainer rank gives to engines that hold the matrices of `shapes` in FP8: a TrainEngine for executors.

    `local_tensors` is collective over the default process group, where there is one. The elements, a byte for each, and
    all scales keep their memory, which the next call overwrites.
    """

    def __init__(self, engine: TrainEngine, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.engine, layout = engine, engine.weight_layout()
        self.shapes = {name + SCALE: scale_shape(shape) for name, shape in sorted(shapes.items())}
        cut = [(shard.box.tensor in shapes, shard) for shard in layout.shards]
        self.shards = {f"{FP8_NAME}:{n}": shard for n, (is_matrix, shard) in enumerate(cut) if is_matrix}
        elements = [Shard(shard.box, name, (0, 0)) for name, shard in self.shards.items()]
        scales = [Shard(whole_box(name, shape), name, (0, 0)) for name, shape in self.shapes.items()]
        self.layout = replace(
            layout,
            shards=(*(shard for is_matrix, shard in cut if not is_matrix), *elements, *scales),
            full_shapes={**layout.full_shapes, **shapes, **self.shapes},
            dtypes={**layout.dtypes, **dict.fromkeys(shapes, FP8_NAME), **dict.fromkeys(self.shapes, "float32")},
        )
        self._elements, self._scales = dict[str, Tensor](), torch.empty(0, device="meta")

    def weight_layout(self) -> WeightLayout:
        """The engine's, with this rank's elements and all scales."""
        return self.layout

    @torch.no_grad()
    def local_tensors(self) -> Mapping[str, Tensor]:
        """The engine's, and those that `weight_layout` adds, quantised now."""
        given, sizes = self.engine.local_tensors(), [*map(prod, self.shapes.values())]
        if (device := device_of(given)) != self._scales.device:
            shapes = {name: shard.box.shape for name, shard in self.shards.items()}
            self._elements = {name: torch.empty(shape, dtype=FP8, device=device) for name, shape in shapes.items()}
            self._scales = torch.empty(sum(sizes), device=device)
        by_name = zip(self.shapes.items(), self._scales.zero_().split(sizes), strict=True)
        scales = {name: part.view(shape) for (name, shape), part in by_name}
        boxes = [
            (shard_view(given, shard), shard.box, scales[shard.box.tensor + SCALE], self._elements[name])
            for name, shard in self.shards.items()
        ]
        quantise(boxes, self._scales, is_shared=dist.is_initialized())
        return {**given, **self._elements, **scales}

    @torch.no_grad()
    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The engine's full tensors, those of `shapes` as elements and scales."""
        for bucket in self.engine.weights(bucket_bytes):
            yield [part for name, tensor in bucket for part in self._parts(name, tensor)]

    def _parts(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if name + SCALE not in self.shapes:
            return [(name, tensor)]
        scales = torch.zeros(self.shapes[name + SCALE], device=tensor.device)
        elements = torch.empty_like(tensor, dtype=FP8)
        quantise([(tensor, whole_box(name, tensor.shape), scales, elements)], scales)
        return [(name, elements), (name + SCALE, scales)]


def float8_shapes(engines: Sequence[WeightLayout]) -> dict[str, tuple[int, ...]]:
    """The matrices that engines hold as float8 elements."""
    return {name: each.full_shapes[name] for each in engines for name, kind in each.dtypes.items() if kind == FP8_NAME}


def quantise(boxes: Sequence[tuple[Tensor, Box, Tensor, Tensor]], scales: Tensor, *, is_shared: bool = False) -> None:
    """Fill the scales and elements of boxes: (values, where they are, the scales of the whole matrix, its elements).

    `scales` are those of all matrices, zeros at first. With `is_shared` other ranks hold other boxes of them.
    """
    for values, box, own, _ in boxes:
        _quantise_box(values, box, own)
    if is_shared:
        dist.all_reduce(scales, dist.ReduceOp.MAX)
    scales.clamp_(min=SMALLEST).div_(LARGEST)
    for values, box, own, elements in boxes:
        _quantise_box(values, box, own, elements)


def _quantise_box(values: Tensor, box: Box, scales: Tensor, elements: Tensor | None = None) -> None:
    """Raise the scales of the blocks that a box touches to its largest magnitudes; or divide its elements by them."""
    before, ends = [at % BLOCK for at in box.start], zip(box.start, box.shape, strict=True)
    touched = scales[tuple(slice(at // BLOCK, -(-(at + n) // BLOCK)) for at, n in ends)]
    if values.is_cuda:
        from rlsys.weights import kernels

        kernels.quantise_blocks(values, before, touched, elements)
        return
    rows, columns = ((n, -(n + size) % BLOCK) for n, size in zip(before, box.shape, strict=True))
    whole = pad(values.to(torch.bfloat16), (*columns, *rows))
    blocks = whole.view(touched.shape[0], BLOCK, touched.shape[1], BLOCK)
    if elements is None:
        torch.maximum(touched, blocks.abs().float().amax((1, 3)), out=touched)
    else:
        quotients = (blocks * (1.0 / touched)[:, None, :, None]).to(FP8)
        elements.copy_(quotients.flatten(2).flatten(0, 1)[slices(before, box.shape)])
