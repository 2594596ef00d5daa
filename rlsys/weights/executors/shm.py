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

import torch

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import WeightLayout
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import add_up, digest
from rlsys.weights.checksum_cpu import MODULUS
from rlsys.weights.image import ImageTensor, largest_differences, plan_image, read_boxes, tensors_in, write_boxes
from rlsys.weights.plan import Copy
from rlsys.weights.segment import Segment
from rlsys.weights.target import Moved, Target

ALIGN_BYTES = 64
TOKEN_WORDS = 2
NEVER = -(1 << 62)


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
    num_tensors = len({name for layout in destinations for name in layout.full_shapes})
    header_bytes = -(-8 * _header_words(len(sources), num_tensors) // ALIGN_BYTES) * ALIGN_BYTES
    image = plan_image(sources, destinations, start_bytes=header_bytes, align_bytes=ALIGN_BYTES)
    reader = ShmSpec(secrets.randbits(62), "", image.num_bytes, len(sources), image.tensors, image.names)
    writers = tuple(
        replace(reader, writes=image.plan.from_rank(layout.rank), writer=n) for n, layout in enumerate(sources)
    )
    return ShmPlan(writers, reader, image.plan.unused)


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
        self.tensors = tensors_in(self.segment.bytes, spec.tensors)

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
    """A trainer rank's side. The first to be made creates the segment; `address` is for the others."""

    def __init__(self, spec: ShmSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self.image = _Image(spec)
        self.address = self.image.segment.path

    def send(self, version: int) -> Moved:
        """Write this rank's boxes and their checksums; returns when the version is complete on this rank."""
        started_s = time.monotonic()
        image, spec = self.image, self.spec
        mine = image.versions[spec.writer]
        mine[0], mine[1] = version, NEVER
        sums = write_boxes(spec.writes, self.engine.local_tensors(), image.tensors)
        image.sums[spec.writer] = torch.tensor([_signed(sums.get(entry.name, 0)) for entry in spec.tensors])
        mine[1] = version
        return Moved(version, sum(copy.num_bytes for copy in spec.writes), time.monotonic() - started_s, "")

    def close(self) -> None:
        self.image.close()


class ShmReader:
    """A rollout engine's side."""

    def __init__(self, spec: ShmSpec, engine: RolloutEngine) -> None:
        self.spec, self.target = spec, Target(engine)
        self.image = _Image(spec)
        self.address = self.image.segment.path

    def receive(self, version: int) -> Moved:
        """Bring the engine to `version`: quarantine, copy, verify, release. An error leaves it quarantined."""
        started_s = time.monotonic()
        tensors = self.target.begin()
        self._check_version(version)
        published = self.image.published()
        num_bytes = read_boxes(self.target.layout, tensors, self.image.tensors, self.spec.names, published)
        self._check_version(version)
        self.target.finish(version)
        return Moved(version, num_bytes, time.monotonic() - started_s, digest(published))

    def differences(self) -> dict[str, float]:
        """The largest absolute difference between the engine's elements and the image, by rollout tensor."""
        engine = self.target.engine
        return largest_differences(engine.weight_layout(), engine.local_tensors(), self.image.tensors, self.spec.names)

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
