"""The layout of an engine learned from the engine itself: what its own loader puts where.

Every element of the HF tensors gets a number, whose digits are loaded as values that all of bfloat16, float16 and
float32 hold exactly: 1 to 125 and -1 to -125, one digit per pass. The engine's parameters are read back and the numbers
are decoded into boxes, as strided views of the parameters, so that fused, stacked, transposed, padded, replicated, tied
and cut parameters need no table of an engine's internals. All other tensors are left to the engine's loader.

The digits of float8 tensors are bit patterns.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rlsys.models.quantized import FP8
from rlsys.types import Box, Shapes, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError, raised_as
from rlsys.utils.grouping import buckets
from rlsys.weights.batched_copy import bits_of
from rlsys.weights.decode import CHUNK, Dims, NotBoxesError, StridedView, decode_boxes
from rlsys.weights.layout import device_of, dtype_of, element_bytes, view_of

Load = Callable[[list[tuple[str, Tensor]]], None]
RADIX, UNTOUCHED = 250, 126.0
"""The base of the digits, and a value that is none of them, with which parameters are filled before a load."""
NONE, INVALID = -1, -2
"""In place of a digit: the element was not loaded, or holds a value that is no digit."""
IN_FLOAT8 = f"its dtype is {FP8}"
"""How the reason ends for which a matrix is left to the loader that the engine holds in float8."""
EXACT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Learned:
    """What a rank of an engine holds.

    `views` are the local tensors of `layout` that are not parameters but strided views of them. `loader_only` gives
    the reason for each tensor in `layout.loader`. A tensor of which this rank holds nothing is not in the layout.
    """

    layout: WeightLayout
    views: Mapping[str, tuple[str, StridedView]]
    loader_only: Mapping[str, str]

    def tensors(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The engine's local tensors and the views, under the names that the layout uses."""
        return {**local, **{name: view.of(local[base]) for name, (base, view) in self.views.items()}}


class _PlacedBox(NamedTuple):
    """A box of an HF tensor in a local tensor."""

    box: Box
    local: str
    view: StridedView


def learn_layout(
    load: Load,
    local_tensors: Callable[[], Mapping[str, Tensor]],
    shapes: Shapes,
    dtypes: Mapping[str, str],
    *,
    aliases: Mapping[str, str] | None = None,
    bucket_bytes: int = 1 << 30,
    max_boxes: int = 4096,
    keep: bool = False,
) -> Learned:
    """Load numbered tensors through the engine's own loader and decode where they went.

    `load` must accept any subset of the tensors, as full HF tensors in `dtypes`, and shard them itself. With `keep` the
    parameters are saved on the host and restored; without it the weights are lost (padding and buffers are not), and
    the engine must not serve until the next push. Tensors that need more than `max_boxes` boxes in one parameter stay
    with the loader. WeightTransferError when the loader refuses.
    """
    local = dict(local_tensors())
    saved = {name: tensor.to("cpu", copy=True) for name, tensor in local.items()} if keep else {}
    boxes = list[_PlacedBox]()
    loader_only = dict[str, str]()
    try:
        for bucket in buckets({n: prod(s) * element_bytes(dtypes[n]) for n, s in shapes.items()}, bucket_bytes):
            probe = _Probe(load, local, {n: (shapes[n], dtype_of(dtypes[n])) for n in bucket}, max_boxes)
            boxes += probe.run()
            loader_only |= probe.loader_only
    finally:
        for name, tensor in saved.items():
            local[name].copy_(tensor)
    if {name: t.data_ptr() for name, t in local_tensors().items()} != {name: t.data_ptr() for name, t in local.items()}:
        raise WeightTransferError("the engine's parameters moved while it loaded: its layout cannot be learned")
    return _assemble(boxes, local, shapes, dtypes, loader_only, aliases or {})


class _Probe:
    """One bucket of tensors: loaded as numbers, and decoded in all local tensors that loading it changes."""

    def __init__(
        self, load: Load, local: Mapping[str, Tensor], tensors: Mapping[str, tuple[Dims, torch.dtype]], max_boxes: int
    ) -> None:
        self.load, self.tensors, self.device, self.max_boxes = load, tensors, device_of(local), max_boxes
        self.loader_only: dict[str, str] = {}
        self.exact = {*EXACT_DTYPES, *(dtype for _, dtype in tensors.values())}
        ends = list(accumulate((prod(shape) for shape, _ in tensors.values()), initial=0))
        self.base = dict(zip(tensors, ends))  # the number of the first element of each tensor
        self.num_passes = next(k for k in range(1, 9) if RADIX**k >= ends[-1])
        self.local = {name: local[name] for name in self._changed(local, list(tensors))}

    @torch.no_grad()
    def run(self) -> list[_PlacedBox]:
        """The boxes of the bucket; what the loader does not write in the local tensors is restored."""
        before = {name: tensor.clone() for name, tensor in self.local.items()}
        try:
            boxes, failures = self._decode()
            self._attribute_failures(failures)
            self._attribute_to_several(failures, {placed.box.tensor for placed in boxes})
            boxes = [placed for placed in boxes if placed.box.tensor not in self.loader_only]
            self._attribute_failures(self._mismatched(boxes))
            return [placed for placed in boxes if placed.box.tensor not in self.loader_only]
        finally:
            for name, tensor in before.items():
                self.local[name].copy_(tensor)

    def _decode(self) -> tuple[list[_PlacedBox], dict[str, str]]:
        """All boxes, and the reasons for local tensors that cannot be decoded."""
        placed = list[_PlacedBox]()
        numbers_by_local, failures = self._read_back()
        names, full_shapes = list(self.tensors), [shape for shape, _ in self.tensors.values()]
        for name, numbers in numbers_by_local.items():
            starts = torch.tensor(list(self.base.values()), device=numbers.device, dtype=numbers.dtype)
            try:
                boxes = decode_boxes(numbers, self.local[name].stride(), starts, full_shapes, max_boxes=self.max_boxes)
            except NotBoxesError as error:
                failures[name] = str(error)
                continue
            placed += [_PlacedBox(Box(names[t], start, view.shape), name, view) for t, start, view in boxes]
        return placed, {name: failures[name] for name in self.local if name in failures}

    def _read_back(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The number of each element of the local tensors, -1 for none; and why other local tensors have no numbers."""
        numbers = {n: torch.zeros_like(t, dtype=torch.int32) for n, t in self.local.items() if t.dtype in self.exact}
        failures = {n: f"its dtype is {t.dtype}" for n, t in self.local.items() if t.dtype not in self.exact}
        absent: dict[str, Tensor] = {}
        for power in range(self.num_passes):
            self._clear()
            self._load(lambda name, power=power: self._digits_of(name, power), list(self.tensors))
            for name in list(numbers):
                digits = _decode_digits(self.local[name])
                is_absent = digits == NONE
                if not torch.equal(is_absent, absent.setdefault(name, is_absent)) or (digits == INVALID).any():
                    failures[name] = "its values are not those that were loaded"
                    del numbers[name]
                else:
                    numbers[name].add_(digits, alpha=RADIX**power)
                del digits, is_absent
        return {n: held.masked_fill_(absent[n], NONE) for n, held in numbers.items()}, failures

    def _clear(self) -> None:
        """Fill the local tensors with a value that is no digit."""
        for tensor in self.local.values():
            if tensor.dtype in self.exact:
                tensor.fill_(torch.finfo(FP8).max if tensor.dtype == FP8 else UNTOUCHED)

    def _changed(self, local: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
        """The local tensors that differ after two loads of different values."""
        fingerprints = []
        for seed in range(2):
            self._load(lambda name, seed=seed: self._random(name, seed), names)
            fingerprints.append({name: int(bits_of(t).sum(dtype=torch.int64)) for name, t in local.items()})
        return [name for name in local if fingerprints[0][name] != fingerprints[1][name]]

    def _load(self, values: Callable[[str], Tensor], names: Sequence[str]) -> None:
        with raised_as(WeightTransferError, "the engine's loader refused the tensors of a probe", Exception):
            self.load([(name, values(name)) for name in names])

    def _digits_of(self, name: str, power: int) -> Tensor:
        """The digits of a tensor's numbers, as values to load."""

        def numbers(first: int, count: int) -> Tensor:
            first += self.base[name]
            number = torch.arange(first, first + count, dtype=torch.int32, device=self.device)
            return _values_of(number.div_(RADIX**power, rounding_mode="floor").remainder_(RADIX), self.tensors[name][1])

        return self._filled(name, numbers)

    def _random(self, name: str, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(2 * self.base[name] + seed)
        return self._filled(name, lambda _, count: torch.randn(count, generator=generator, device=self.device))

    def _filled(self, name: str, values: Callable[[int, int], Tensor]) -> Tensor:
        """A tensor of `values(first, count)`, in chunks: the wider types they are computed in need more memory."""
        shape, dtype = self.tensors[name]
        flat = torch.empty(prod(shape), dtype=dtype, device=self.device)
        for first in range(0, flat.numel(), CHUNK):
            chunk = flat[first : first + CHUNK]
            chunk.copy_(values(first, len(chunk)))
        return flat.view(shape)

    def _mismatched(self, boxes: Sequence[_PlacedBox]) -> dict[str, str]:
        """The local tensors where random tensors placed by the boxes differ from what the loader makes of them."""
        if not boxes:
            return {}
        self._clear()
        self._load(self._random, sorted({placed.box.tensor for placed in boxes}))
        expected = {name: self.local[name].clone() for name in {placed.local for placed in boxes}}
        self._clear()
        for placed in boxes:
            source = view_of(self._random(placed.box.tensor), placed.box.start, placed.box.shape)
            placed.view.of(self.local[placed.local]).copy_(source)
        mismatched = {}
        for name, loaded in expected.items():
            filled, loaded = _signed(self.local[name]), _signed(loaded)
            written = (filled != UNTOUCHED) | ((loaded != UNTOUCHED) & (loaded != 0))
            if (written & (loaded != filled)).any():
                mismatched[name] = "the loader changes the values that it places"
        return mismatched

    def _attribute_failures(self, failures: Mapping[str, str]) -> None:
        """Leave to the loader the HF tensors that go into failed local tensors: loading one alone changes them."""
        suspects = {name: self.local[name] for name in failures}
        for name in self.tensors if failures else ():
            for local in self._changed(suspects, [name]):
                self.loader_only[name] = f"{local}: {failures[local]}"

    def _attribute_to_several(self, failures: Mapping[str, str], decoded: Set[str]) -> None:
        """The same for local tensors that change only if several HF tensors, none of them `decoded`, come together.

        These are all without which the local tensor does not change.
        """
        explained = {reason.partition(":")[0] for reason in self.loader_only.values()}
        suspects = {name: self.local[name] for name in failures if name not in explained}
        names = [name for name in self.tensors if name not in decoded and name not in self.loader_only]
        suspects = {name: suspects[name] for name in self._changed(suspects, names)} if suspects else {}
        for name in names if suspects else ():
            changed = self._changed(suspects, [other for other in names if other != name])
            for local in (local for local in suspects if local not in changed):
                self.loader_only[name] = f"{local}: {failures[local]}"


def _values_of(digits: Tensor, dtype: torch.dtype) -> Tensor:
    """The values 1 to 125 and -1 to -125 for digits; in float8 the value whose bits are this sign and magnitude."""
    values = torch.where(digits < RADIX // 2, digits + 1, RADIX // 2 - 1 - digits)
    return torch.where(values < 0, 128 - values, values).to(torch.uint8).view(FP8) if dtype == FP8 else values


def _signed(tensor: Tensor) -> Tensor:
    """The numbers that digits are decoded from: those of `_values_of`."""
    if tensor.dtype != FP8:
        return tensor
    bits = tensor.view(torch.uint8).to(torch.int16)
    return torch.where(bits < 128, bits, 128 - bits)


def _decode_digits(tensor: Tensor) -> Tensor:
    """The digit of every element (int16), NONE where it was not loaded or is padding, INVALID where it is no digit."""
    tensor = _signed(tensor)
    digits = tensor.to(torch.int16, copy=True).abs_().sub_(1).add_(tensor < 0, alpha=RADIX // 2)
    digits[(tensor.abs() > RADIX // 2) | (tensor != tensor.round())] = INVALID
    digits[(tensor == 0) | (tensor == UNTOUCHED)] = NONE
    return digits


def _assemble(
    boxes: Sequence[_PlacedBox],
    local: Mapping[str, Tensor],
    shapes: Shapes,
    dtypes: Mapping[str, str],
    loader_only: dict[str, str],
    aliases: Mapping[str, str],
) -> Learned:
    """Shards in the parameters themselves where a box is a plain slice of one, in strided views where it is not."""
    held: dict[str, str] = {}
    for placed in boxes:
        dtype = str(local[placed.local].dtype).removeprefix("torch.")
        if held.setdefault(placed.box.tensor, dtype) != dtype:
            loader_only[placed.box.tensor] = f"it is held both as {held[placed.box.tensor]} and as {dtype}"
    shards, views = list[Shard](), dict[str, tuple[str, StridedView]]()
    for placed in boxes:
        if placed.box.tensor in loader_only:
            continue
        name = placed.local
        start = placed.view.slice_start(local[name], len(placed.box.shape))
        if start is None:
            name, start = f"{placed.local}@{len(views)}", (0,) * len(placed.box.shape)
            views[name] = placed.local, placed.view
        shards.append(Shard(placed.box, name, start))
    present = [name for name in shapes if name in held or name in loader_only]
    layout = WeightLayout(
        rank=0,
        host="",
        shards=tuple(shards),
        full_shapes={name: tuple(shapes[name]) for name in present},
        dtypes={name: dtypes[name] if name in loader_only else held[name] for name in present},
        aliases={alias: name for alias, name in aliases.items() if name in present},
        loader=tuple(name for name in shapes if name in loader_only),
    )
    return Learned(layout, views, loader_only)
