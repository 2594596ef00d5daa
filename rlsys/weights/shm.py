"""The shared-memory executor: every trainer rank writes the boxes it owns, rollout engines read what they hold.

One segment holds the image: each tensor that any engine wants, whole, in the engines' dtype. No rank gathers anything.
A header carries, for each writer, the version it last began and ended, and the checksums of what it wrote; a reader
takes an image only if all writers ended the same version, checks it, and leaves its engine quarantined if anything is
wrong.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import Box, Shard, WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import MODULUS, add_up, box_checksum, digest
from rlsys.weights.layout import check_layouts, dtype_of, element_bytes, shard_view, view_of, whole_box
from rlsys.weights.plan import Copy, make_plan, resolve_names
from rlsys.weights.segment import Segment

ALIGN_BYTES = 64
TOKEN_WORDS = 2
NEVER = -(1 << 62)
IMAGE_RANK = 0


@dataclass(frozen=True)
class ImageTensor:
    """A whole tensor in the segment, `offset` bytes from its start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * element_bytes(self.dtype)


@dataclass(frozen=True)
class ShmSpec:
    """What one rank needs to take part; plain data. `writes` are this rank's copies into the image (none for readers).

    `names` tells under which image tensor each rollout tensor is held. With an empty `path` the segment is created.
    """

    token: int
    path: str
    num_bytes: int
    num_writers: int
    tensors: tuple[ImageTensor, ...]
    names: Mapping[str, str]
    writes: tuple[Copy, ...] = ()
    writer: int = -1


@dataclass(frozen=True)
class Moved:
    """What one rank did for a push; `checksum` is over all tensors of the image, "" for a rank that cannot tell."""

    version: int
    num_bytes: int
    seconds: float
    checksum: str


@dataclass(frozen=True)
class ShmPlan:
    """The specs of all writers in the order of their ranks, and the one of every reader."""

    writers: tuple[ShmSpec, ...]
    reader: ShmSpec
    unused: tuple[str, ...]

    def at(self, path: str) -> ShmPlan:
        """The same with the place of the created segment."""
        return replace(
            self, writers=tuple(replace(w, path=path) for w in self.writers), reader=replace(self.reader, path=path)
        )


def plan_shm(sources: Sequence[WeightLayout], destinations: Sequence[WeightLayout]) -> ShmPlan:
    """Lay out the image and share the writing among the trainer's ranks; `sources` in the order of their ranks.

    Raises WeightTransferError when the layouts do not fit each other or lie on several hosts.
    """
    if len(hosts := {layout.host for layout in (*sources, *destinations)}) > 1:
        raise WeightTransferError(f"shared memory joins one host only, trainer and rollout are on {sorted(hosts)}")
    check_layouts(sources, "trainer")
    check_layouts(destinations, "rollout")
    names = resolve_names(sources, destinations)
    dtypes = _image_dtypes(destinations, names)
    header_bytes = _aligned(8 * _header_words(len(sources), len(dtypes)))
    tensors, end = [], header_bytes
    shapes = {name: shape for layout in sources for name, shape in layout.full_shapes.items()}
    for name in sorted(dtypes):
        tensors.append(ImageTensor(name, tuple(shapes[name]), dtypes[name], end))
        end = _aligned(end + tensors[-1].num_bytes)
    image = WeightLayout(
        rank=IMAGE_RANK,
        host="",
        shards=tuple(Shard(whole_box(t.name, t.shape), t.name, (0,) * len(t.shape)) for t in tensors),
        full_shapes={t.name: t.shape for t in tensors},
        dtypes=dtypes,
    )
    plan = make_plan(sources, [image])
    reader = ShmSpec(secrets.randbits(62), "", end, len(sources), tuple(tensors), names)
    writers = tuple(
        replace(reader, writes=plan.from_rank(layout.rank), writer=number) for number, layout in enumerate(sources)
    )
    return ShmPlan(writers, reader, plan.unused)


def _image_dtypes(destinations: Sequence[WeightLayout], names: Mapping[str, str]) -> dict[str, str]:
    """Each image tensor in the dtype of the engines; the first engine's where they differ (the others cast)."""
    dtypes: dict[str, str] = {}
    for layout in destinations:
        for name, dtype in layout.dtypes.items():
            dtypes.setdefault(names[name], dtype)
    return dtypes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _header_words(num_writers: int, num_tensors: int) -> int:
    """Token, then (begun, ended) of each writer, then a checksum for each writer and tensor."""
    return TOKEN_WORDS + 2 * num_writers + num_writers * num_tensors


class _Image:
    """The mapped segment, seen as header and tensors."""

    def __init__(self, spec: ShmSpec) -> None:
        self.spec = spec
        self.segment = Segment.open(spec.path, spec.num_bytes) if spec.path else Segment.create(spec.num_bytes)
        words = self.segment.bytes[: 8 * _header_words(spec.num_writers, len(spec.tensors))].view(torch.int64)
        self._token, rest = words[:TOKEN_WORDS], words[TOKEN_WORDS:]
        self.versions = rest[: 2 * spec.num_writers].view(spec.num_writers, 2)
        self.sums = rest[2 * spec.num_writers :].view(spec.num_writers, len(spec.tensors))
        if not spec.path:
            self._token[0] = spec.token
            self.versions.fill_(NEVER)
        elif int(self._token[0]) != spec.token:
            self.segment.close()
            raise WeightTransferError(f"{spec.path} is the memory of another transfer")
        self.tensors = {t.name: self._tensor(t) for t in spec.tensors}

    def _tensor(self, entry: ImageTensor) -> Tensor:
        flat = self.segment.bytes[entry.offset : entry.offset + entry.num_bytes]
        return flat.view(dtype_of(entry.dtype)).view(entry.shape)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The column of each tensor in the table of checksums."""
        return {entry.name: number for number, entry in enumerate(self.spec.tensors)}

    def published(self) -> dict[str, int]:
        """The checksum of every tensor as its writers state it."""
        totals = zip(*self.sums.tolist(), strict=True)
        return {entry.name: add_up(parts) for entry, parts in zip(self.spec.tensors, totals, strict=True)}

    def close(self) -> None:
        self.tensors = {}
        empty = torch.empty(0, dtype=torch.int64)
        self._token = self.versions = self.sums = empty
        self.segment.close()


class ShmWriter:
    """A trainer rank's side. The first to be made creates the segment; `path` is for the others."""

    def __init__(self, spec: ShmSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self.image = _Image(spec)
        self.path = self.image.segment.path

    @torch.no_grad()
    def write(self, version: int) -> Moved:
        """Write this rank's boxes and their checksums; returns when the version is complete on this rank."""
        started_s = time.monotonic()
        image, spec = self.image, self.spec
        mine = image.versions[spec.writer]
        mine[0], mine[1] = version, NEVER
        tensors = self.engine.local_tensors()
        sums = dict.fromkeys(image.numbers, 0)
        for copy in spec.writes:
            held = Shard(Box(copy.tensor, copy.start, copy.shape), copy.source_local, copy.source_start)
            target = view_of(image.tensors[copy.tensor], copy.start, copy.shape)
            target.copy_(shard_view(tensors, held))
            sums[copy.tensor] += box_checksum(target, copy.start, image.tensors[copy.tensor].shape)
        image.sums[spec.writer] = torch.tensor([_signed(sums[entry.name]) for entry in spec.tensors])
        mine[1] = version
        return Moved(version, sum(copy.num_bytes for copy in spec.writes), time.monotonic() - started_s, "")

    def close(self) -> None:
        self.image.close()


class ShmReader:
    """A rollout engine's side."""

    def __init__(self, spec: ShmSpec, engine: RolloutEngine) -> None:
        self.spec, self.engine = spec, engine
        self.image = _Image(spec)
        self.path = self.image.segment.path

    @torch.no_grad()
    def read(self, version: int) -> Moved:
        """Bring the engine to `version`: quarantine, copy, verify, release. An error leaves it quarantined."""
        started_s = time.monotonic()
        engine, image = self.engine, self.image
        engine.begin_update()
        self._check_version(version)
        layout, tensors, published = engine.weight_layout(), engine.local_tensors(), image.published()
        checked: set[str] = set()
        num_bytes = sum(self._take(shard, tensors, published, checked) for shard in layout.shards)
        self._check_version(version)
        engine.finish_update(version)
        return Moved(version, num_bytes, time.monotonic() - started_s, digest(published))

    def _take(
        self, shard: Shard, tensors: Mapping[str, Tensor], published: Mapping[str, int], checked: set[str]
    ) -> int:
        """Copy one shard; check it or, where it is a part or is cast, the image it comes from. Returns its bytes."""
        name = self.spec.names[shard.box.tensor]
        image, target = self.image.tensors[name], shard_view(tensors, shard)
        target.copy_(view_of(image, shard.box.start, shard.box.shape))
        proof = target if target.shape == image.shape and target.dtype == image.dtype else image
        if proof is target or name not in checked:
            if box_checksum(proof, (0,) * image.ndim, image.shape) != published[name]:
                raise WeightTransferError(f"tensor '{name}' that arrived is not the one that the trainer wrote")
            checked.add(name)
        return target.numel() * target.element_size()

    def differences(self) -> dict[str, float]:
        """The largest absolute difference between the engine's elements and the image, by rollout tensor."""
        tensors, largest = self.engine.local_tensors(), dict[str, float]()
        for shard in self.engine.weight_layout().shards:
            source = view_of(self.image.tensors[self.spec.names[shard.box.tensor]], shard.box.start, shard.box.shape)
            apart = (shard_view(tensors, shard).to(source.device, torch.float64) - source.double()).abs()
            name = shard.box.tensor
            largest[name] = max(largest.get(name, 0.0), float(apart.max()) if apart.numel() else 0.0)
        return largest

    def _check_version(self, version: int) -> None:
        late = [
            rank for rank, (begun, ended) in enumerate(self.image.versions.tolist()) if not begun == ended == version
        ]
        if late:
            ranks = ", ".join(map(str, late))
            raise WeightTransferError(f"trainer rank {ranks} has not completed weight version {version}")

    def close(self) -> None:
        self.image.close()


def _signed(value: int) -> int:
    value %= MODULUS
    return value - MODULUS if value >= MODULUS >> 1 else value
