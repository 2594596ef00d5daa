"""A trainer's weights for engines that serve FP8: float8 elements, and a float32 scale for each block.

The largest magnitude of each block is agreed among the trainer's ranks, so that each quantises only what it holds,
also of blocks that its shards cut. Arithmetic as of vLLM's `per_block_cast_to_fp8`, of weights rounded to bfloat16.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlsys.interfaces import TrainEngine
from rlsys.models.quantized import FP8, FP8_NAME, LARGEST, SCALE, SMALLEST, block_of
from rlsys.types import Box, Shapes, Shard, WeightLayout
from rlsys.utils.boxes import slices
from rlsys.utils.grouping import group_by
from rlsys.weights.layout import device_of, shard_view, whole_box


class Fp8Weights:
    """What a trainer rank gives to engines that hold some matrices in FP8: a TrainEngine for executors.

    `shapes` are those of the matrices and of their scales, which say how large blocks are.
    `local_tensors` is collective over the default process group, where there is one. The elements, a byte for each, and
    all scales keep their memory, which the next call overwrites.
    """

    def __init__(self, engine: TrainEngine, shapes: Shapes) -> None:
        self.engine, layout = engine, engine.weight_layout()
        self.shapes = {name: shape for name, shape in sorted(shapes.items()) if name.endswith(SCALE)}
        self._matrices = [shard for shard in layout.shards if shard.box.tensor in shapes]
        self._elements, self._elements_shapes = _stacked((shard.box for shard in self._matrices), FP8_NAME)
        self._scales, self._scales_shapes = _stacked((whole_box(*each) for each in self.shapes.items()), SCALE)
        self.layout = replace(
            layout,
            shards=(*(s for s in layout.shards if s.box.tensor not in shapes), *self._elements, *self._scales),
            full_shapes={**layout.full_shapes, **shapes},
            dtypes={**layout.dtypes, **dict.fromkeys(shapes, FP8_NAME), **dict.fromkeys(self.shapes, "float32")},
        )
        self._own, self._all_scales, self._addresses = dict[str, Tensor](), torch.empty(0, device="meta"), [-1]

    def weight_layout(self) -> WeightLayout:
        """The engine's, with this rank's elements and all scales."""
        return self.layout

    @torch.no_grad()
    def local_tensors(self) -> Mapping[str, Tensor]:
        """The engine's, and those that `weight_layout` adds, quantised now."""
        given = self.engine.local_tensors()
        if (device := device_of(given)) != self._all_scales.device:
            shapes = self._scales_shapes
            self._all_scales = torch.empty(sum(map(prod, shapes.values())), device=device)
            parts = zip(shapes.items(), self._all_scales.split([*map(prod, shapes.values())]), strict=True)
            self._own = {name: part.view(shape) for (name, shape), part in parts}
            self._own |= {n: torch.empty(s, dtype=FP8, device=device) for n, s in self._elements_shapes.items()}
        if (addresses := [given[shard.local].data_ptr() for shard in self._matrices]) != self._addresses:
            scales, shapes = {s.box.tensor: shard_view(self._own, s) for s in self._scales}, self.layout.full_shapes
            boxes = []
            for held, own in zip(self._matrices, self._elements, strict=True):
                name, elements = held.box.tensor, shard_view(self._own, own)
                boxes.append(MatrixBox(shard_view(given, held), held.box, shapes[name], scales[name + SCALE], elements))
            self._quantise, self._addresses = prepared_quantiser(boxes, self._all_scales), addresses
        self._quantise(dist.is_initialized())
        return {**given, **self._own}

    @torch.no_grad()
    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The engine's full tensors, those of `shapes` as elements and scales."""
        for bucket in self.engine.weights(bucket_bytes):
            yield [part for name, tensor in bucket for part in self._parts(name, tensor)]

    def _parts(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if name + SCALE not in self.shapes:
            return [(name, tensor)]
        scales = torch.empty(self.shapes[name + SCALE], device=tensor.device)
        elements, box = torch.empty_like(tensor, dtype=FP8), whole_box(name, tensor.shape)
        prepared_quantiser([MatrixBox(tensor, box, box.shape, scales, elements)], scales)(False)
        return [(name, elements), (name + SCALE, scales)]


def float8_shapes(engines: Sequence[WeightLayout]) -> Shapes:
    """The matrices that engines hold as float8 elements, and their scales."""
    held = [(each.full_shapes, name) for each in engines for name, kind in each.dtypes.items() if kind == FP8_NAME]
    return {part: shapes[part] for shapes, name in held for part in (name, name + SCALE)}


def _stacked(boxes: Iterable[Box], name: str) -> tuple[list[Shard], Shapes]:
    """Places for boxes, those of one shape in one tensor, and the shapes of these tensors."""
    shards, shapes = list[Shard](), dict[str, tuple[int, ...]]()
    for box in boxes:
        local = f"{name}:{box.shape}"
        count, *_ = shapes.get(local, (0,))
        shards.append(Shard(box, local, (count, *[0] * len(box.shape))))
        shapes[local] = count + 1, *box.shape
    return shards, shapes


@dataclass(frozen=True)
class MatrixBox:
    """A box of a matrix: its values, where they are, the matrix's shape and all its scales, and the box's elements."""

    values: Tensor
    box: Box
    shape: Sequence[int]
    scales: Tensor
    elements: Tensor

    @property
    def block(self) -> int:
        """Rows and columns of a block."""
        return block_of(self.shape, self.scales.shape)

    @property
    def before(self) -> list[int]:
        """Rows and columns of its first block that are before it."""
        return [at % self.block for at in self.box.start]

    @property
    def touched(self) -> Tensor:
        """The scales (R, C) of the blocks that it touches."""
        ends, block = zip(self.box.start, self.box.shape, strict=True), self.block
        return self.scales[tuple(slice(at // block, -(-(at + n) // block)) for at, n in ends)]

    @property
    def is_aligned(self) -> bool:
        """Whether all of its rows and blocks begin at multiples of 16."""
        row_stride, column_stride = self.values.stride()
        starts = (self.values.data_ptr(), row_stride, self.box.shape[1], self.before[1], self.elements.data_ptr())
        return column_stride == 1 and not any(start % 16 for start in starts)

    def row(self) -> tuple[int, ...]:
        """Its row of `kernels.quantise_blocks`, with the number of its blocks in place of its first block."""
        touched, block = self.touched, self.block
        dims = zip(self.box.start, self.box.shape, self.shape, strict=True)
        is_cut = any(at % block or ((at + n) % block and at + n < full) for at, n, full in dims)
        place = self.values.data_ptr(), *self.values.stride(), *self.box.shape, *self.before, self.elements.data_ptr()
        return is_cut, touched.numel(), touched.shape[1], *place, touched.data_ptr(), touched.stride(0)


class BlockTables:
    """Boxes that stay in place, for one launch a pass over the blocks of all; those are last that boxes share."""

    def __init__(self, boxes: Iterable[MatrixBox]) -> None:
        self._tables = list[tuple[Tensor, Tensor, int, tuple[int, torch.dtype, bool]]]()
        for kind, own in group_by(boxes, lambda box: (box.block, box.values.dtype, box.is_aligned)).items():
            table, device = torch.tensor(sorted(box.row() for box in own)), own[0].values.device
            counts = table[:, 1].clone()
            table[:, 1] = counts.cumsum(0) - counts
            owners, num_whole = torch.repeat_interleave(counts).int(), int(counts[table[:, 0] == 0].sum())
            self._tables.append((table.to(device), owners.to(device), num_whole, kind))

    def __call__(self, *, divides: bool) -> None:
        from rlsys.weights import kernels

        for table, owners, num_whole, (block, dtype, aligned) in self._tables:
            kernels.quantise_blocks(table, owners, num_whole, dtype, block=block, aligned=aligned, divides=divides)


def prepared_quantiser(boxes: Sequence[MatrixBox], scales: Tensor) -> Callable[[bool], None]:
    """A function that fills the elements of boxes, which stay in place while their values change, and all scales.

    Its argument says whether other ranks hold other boxes of these matrices.
    """
    run = BlockTables(boxes) if scales.is_cuda else partial(_quantise_on_cpu, boxes)

    def quantise(is_shared: bool) -> None:
        scales.zero_()
        run(divides=False)
        if is_shared:
            dist.all_reduce(scales, dist.ReduceOp.MAX)
        scales.clamp_(min=SMALLEST).div_(LARGEST)
        run(divides=True)

    return quantise


def _quantise_on_cpu(boxes: Sequence[MatrixBox], *, divides: bool) -> None:
    """Raise the scales of all blocks to their largest magnitudes; or divide the elements by them."""
    for box in boxes:
        before, touched, block = box.before, box.touched, box.block
        rows, columns = ((n, -(n + size) % block) for n, size in zip(before, box.box.shape, strict=True))
        whole = pad(box.values.to(torch.bfloat16), (*columns, *rows))
        blocks = whole.view(touched.shape[0], block, touched.shape[1], block)
        if divides:
            quotients = (blocks * (1.0 / touched)[:, None, :, None]).to(FP8)
            box.elements.copy_(quotients.flatten(2).flatten(0, 1)[slices(before, box.box.shape)])
        else:
            torch.maximum(touched, blocks.abs().float().amax((1, 3)), out=touched)
