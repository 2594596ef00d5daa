"""The destination layout learned from the engine itself: what its own loader puts where.

Every element of the HF tensors gets a number, whose digits are loaded as values that all of bfloat16, float16 and
float32 hold exactly: 1 to 255 and -1 to -255, one digit a pass. The engine's parameters are read back and the numbers
are decoded into boxes, as strided views of the parameters, so that fused, stacked, transposed, padded, replicated, tied
and cut parameters need no table of an engine's internals. What cannot be expressed so is left to the engine's loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.decode import NotBoxes, Strided, boxes_in
from rlsys.weights.layout import device_of, dtype_of, view_of

Load = Callable[[list[tuple[str, Tensor]]], None]
Shape = tuple[int, ...]
RADIX, UNTOUCHED = 510, 256.0
PART = 1 << 24
"""Elements that are made at a time."""
EXACT = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Learned:
    """What a rank of an engine holds.

    `views` are the local tensors of `layout` that are not parameters but strided views of them. `loader_only` gives
    the reason for each tensor in `layout.loader`; `absent` lists the tensors of which this rank holds nothing.
    `restored` is False when the previous weights are lost: the engine must not serve until the next push.
    """

    layout: WeightLayout
    views: Mapping[str, tuple[str, Strided]]
    loader_only: Mapping[str, str]
    absent: tuple[str, ...]
    restored: bool

    def tensors(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The engine's local tensors and the views, under the names that the layout uses."""
        return {**local, **{name: of.view(local[base]) for name, (base, of) in self.views.items()}}


@dataclass(frozen=True)
class _Found:
    """A box of an HF tensor in a local tensor."""

    box: Box
    local: str
    place: Strided


def learn_layout(
    load: Load,
    local_tensors: Callable[[], Mapping[str, Tensor]],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    *,
    rank: int = 0,
    host: str = "",
    aliases: Mapping[str, str] | None = None,
    bucket_bytes: int = 1 << 30,
    max_boxes: int = 4096,
    keep: bool = False,
    by_loader: Sequence[str] = (),
) -> Learned:
    """Load numbered tensors through the engine's own loader and decode where they went.

    `load` must accept any part of the tensors, as full HF tensors in `dtypes`, and cut them itself. With `keep` the
    parameters are saved on the host and put back, else the
    weights are lost (padding and buffers are not). Tensors that need more than `max_boxes` boxes in
    one parameter, and those in `by_loader`, stay with the loader. WeightTransferError when the loader refuses.
    """
    local = dict(local_tensors())
    saved = {name: tensor.to("cpu", copy=True) for name, tensor in local.items()} if keep else {}
    device = device_of(local)
    found: list[_Found] = []
    loader_only = dict.fromkeys(by_loader, "asked to be left to the loader")
    try:
        for bucket in _buckets({n: s for n, s in shapes.items() if n not in loader_only}, dtypes, bucket_bytes):
            probe = _Probe(load, local, {n: (shapes[n], dtype_of(dtypes[n])) for n in bucket}, device, max_boxes)
            found += probe.run()
            loader_only |= probe.loader_only
    finally:
        for name, tensor in saved.items():
            local[name].copy_(tensor)
    if {name: t.data_ptr() for name, t in local_tensors().items()} != {name: t.data_ptr() for name, t in local.items()}:
        raise WeightTransferError("the engine's parameters moved while it loaded: its layout cannot be learned")
    return _assemble(found, local, shapes, dtypes, loader_only, rank, host, aliases or {}, restored=keep)


def _buckets(shapes: Mapping[str, Shape], dtypes: Mapping[str, str], limit_bytes: int) -> Iterator[list[str]]:
    bucket, filled = list[str](), 0
    for name, shape in shapes.items():
        num_bytes = prod(shape) * dtype_of(dtypes[name]).itemsize
        if bucket and filled + num_bytes > limit_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += num_bytes
    if bucket:
        yield bucket


class _Probe:
    """One bucket of tensors, loaded as numbers and looked for in all local tensors that its loading changes."""

    def __init__(
        self,
        load: Load,
        local: Mapping[str, Tensor],
        tensors: Mapping[str, tuple[Shape, torch.dtype]],
        device: torch.device,
        max_boxes: int,
    ) -> None:
        self.load, self.tensors, self.device, self.max_boxes = load, tensors, device, max_boxes
        self.loader_only: dict[str, str] = {}
        self.base: dict[str, int] = {}
        total = 0
        for name, (shape, _) in tensors.items():
            self.base[name] = total
            total += prod(shape)
        self.num_passes = next(k for k in range(1, 9) if RADIX**k >= total)
        self.local = {name: local[name] for name in self._changed(local, list(tensors))}

    @torch.no_grad()
    def run(self) -> list[_Found]:
        """The boxes; the local tensors keep what the loader does not write, padding and whatever else they hold."""
        before = {name: tensor.clone() for name, tensor in self.local.items()}
        try:
            found, strange = self._decoded()
            self._blame(strange)
            found = [one for one in found if one.box.tensor not in self.loader_only]
            self._blame(self._unproven(found))
            return [one for one in found if one.box.tensor not in self.loader_only]
        finally:
            for name, tensor in before.items():
                self.local[name].copy_(tensor)

    def _decoded(self) -> tuple[list[_Found], dict[str, str]]:
        """All boxes, and what is wrong with the local tensors that have none."""
        found, strange = list[_Found](), dict[str, str]()
        names, wholes = list(self.tensors), [shape for shape, _ in self.tensors.values()]
        for name, numbers in self._read_back().items():
            if isinstance(numbers, str):
                strange[name] = numbers
                continue
            starts = torch.tensor(list(self.base.values()), device=numbers.device, dtype=numbers.dtype)
            try:
                boxes = boxes_in(numbers, self.local[name].stride(), starts, wholes, max_boxes=self.max_boxes)
            except NotBoxes as error:
                strange[name] = str(error)
                continue
            found += [_Found(Box(names[t], start, shape), name, place) for t, start, shape, place in boxes]
        return found, strange

    def _read_back(self) -> dict[str, Tensor | str]:
        """The number of each element of every local tensor, -1 for none, or what is wrong with it."""
        numbers: dict[str, Any] = {n: f"its dtype is {t.dtype}" for n, t in self.local.items() if t.dtype not in EXACT}
        kinds: dict[str, Tensor] = {}
        for power in range(self.num_passes):
            self._clear()
            self._load(lambda name, power=power: self._coded(name, power), list(self.tensors))
            for name in [name for name in self.local if not isinstance(numbers.get(name), str)]:
                kind = _kinds(self.local[name])
                if not torch.equal(kind, kinds.setdefault(name, kind)) or (kind == Kind.STRANGE).any():
                    numbers[name] = "its values are not those that were loaded"
                else:
                    digits = _digits(self.local[name]).mul_(RADIX**power)
                    numbers[name] = numbers[name].add_(digits) if name in numbers else digits
        return {
            name: held if isinstance(held, str) else torch.where(kinds[name] == Kind.DIGIT, held, -1)
            for name, held in numbers.items()
        }

    def _clear(self) -> None:
        for tensor in self.local.values():
            if tensor.dtype in EXACT:
                tensor.fill_(UNTOUCHED)

    def _changed(self, local: Mapping[str, Tensor], names: Sequence[str]) -> list[str]:
        """The local tensors that differ after two loads of different values."""
        prints = []
        for seed in range(2):
            self._load(lambda name, seed=seed: self._random(name, seed), names)
            prints.append({name: _fingerprint(tensor) for name, tensor in local.items()})
        return [name for name in local if prints[0][name] != prints[1][name]]

    def _load(self, values: Callable[[str], Tensor], names: Sequence[str]) -> None:
        try:
            self.load([(name, values(name)) for name in names])
        except Exception as error:
            raise WeightTransferError(f"the engine's loader refused the tensors of a probe: {error}") from error

    def _coded(self, name: str, power: int) -> Tensor:
        def numbers(first: int, count: int) -> Tensor:
            first += self.base[name]
            number = torch.arange(first, first + count, dtype=torch.int32, device=self.device)
            digit = number.div_(RADIX**power, rounding_mode="floor").remainder_(RADIX)
            return torch.where(digit < 255, digit + 1, 254 - digit)

        return self._filled(name, numbers)

    def _random(self, name: str, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(2 * self.base[name] + seed)
        return self._filled(name, lambda _, count: torch.randn(count, generator=generator, device=self.device))

    def _filled(self, name: str, values: Callable[[int, int], Tensor]) -> Tensor:
        """A tensor of `values(first, count)`, made in parts: the wider types they are computed in would not fit."""
        shape, dtype = self.tensors[name]
        flat = torch.empty(prod(shape), dtype=dtype, device=self.device)
        for first in range(0, flat.numel(), PART):
            part = flat[first : first + PART]
            part.copy_(values(first, len(part)))
        return flat.view(shape)

    def _unproven(self, found: Sequence[_Found]) -> dict[str, str]:
        """Local tensors that boxes do not fill, bitwise, with what the loader makes of the same random tensors."""
        if not found:
            return {}
        self._clear()
        self._load(self._random, sorted({one.box.tensor for one in found}))
        wanted = {name: self.local[name].clone() for name in {one.local for one in found}}
        self._clear()
        for one in found:
            source = view_of(self._random(one.box.tensor), one.box.start, one.box.shape)
            one.place.view(self.local[one.local]).copy_(source)
        strange = {}
        for name, loaded in wanted.items():
            filled = self.local[name]
            told = (filled != UNTOUCHED) | ((loaded != UNTOUCHED) & (loaded != 0))
            if not torch.equal(loaded[told], filled[told]):
                strange[name] = "the loader changes the values that it places"
        return strange

    def _blame(self, strange: Mapping[str, str]) -> None:
        """Find the HF tensors that go into the strange local tensors, each by loading it alone."""
        suspects = {name: self.local[name] for name in strange}
        for name in self.tensors if strange else ():
            for local in self._changed(suspects, [name]):
                self.loader_only[name] = f"{local}: {strange[local]}"


class Kind:
    """What an element is after a coded load."""

    UNTOUCHED, PADDING, DIGIT, STRANGE = range(4)


def _fingerprint(tensor: Tensor) -> int:
    """A number that changes with the values, whatever their dtype."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.view(words).sum(dtype=torch.int64))


def _kinds(tensor: Tensor) -> Tensor:
    size = tensor.abs()
    kind = torch.full_like(tensor, Kind.STRANGE, dtype=torch.int8)
    kind[(size >= 1) & (size <= RADIX // 2) & (tensor == tensor.round())] = Kind.DIGIT
    kind[tensor == 0], kind[tensor == UNTOUCHED] = Kind.PADDING, Kind.UNTOUCHED
    return kind


def _digits(tensor: Tensor) -> Tensor:
    """The digit of every element that has one."""
    value = tensor.to(torch.int32)
    negative = value < 0
    return value.abs_().sub_(1).add_(negative, alpha=RADIX // 2)


def _assemble(
    found: Sequence[_Found],
    local: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    loader_only: dict[str, str],
    rank: int,
    host: str,
    aliases: Mapping[str, str],
    *,
    restored: bool,
) -> Learned:
    """Shards under plain names where a box lies in a parameter as it is, under views' names elsewhere."""
    held: dict[str, str] = {}
    for one in found:
        dtype = str(local[one.local].dtype).removeprefix("torch.")
        if held.setdefault(one.box.tensor, dtype) != dtype:
            loader_only[one.box.tensor] = f"it is held both as {held[one.box.tensor]} and as {dtype}"
    shards, views = list[Shard](), dict[str, tuple[str, Strided]]()
    for one in found:
        if one.box.tensor in loader_only:
            continue
        start = one.place.plain_in(local[one.local], len(one.box.shape))
        if start is not None:
            shards.append(Shard(one.box, one.local, start))
        else:
            name = f"{one.local}@{len(views)}"
            views[name] = one.local, one.place
            shards.append(Shard(one.box, name, (0,) * len(one.box.shape)))
    kept = [name for name in shapes if name in held or name in loader_only]
    layout = WeightLayout(
        rank=rank,
        host=host,
        shards=tuple(shards),
        full_shapes={name: tuple(shapes[name]) for name in kept},
        dtypes={name: dtypes[name] if name in loader_only else held[name] for name in kept},
        aliases={alias: name for alias, name in aliases.items() if name in kept},
        loader=tuple(name for name in shapes if name in loader_only),
    )
    absent = tuple(name for name in shapes if name not in held and name not in loader_only)
    return Learned(layout, views, loader_only, absent, restored)
