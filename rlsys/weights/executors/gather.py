"""The slow path: full tensors gathered bucket by bucket and loaded through the engine's own loader.

The trainer's ranks gather together, the first one puts each bucket into shared memory, every engine of the host loads
it. It needs nothing but `weights()` and `load()`, so it is the oracle of all other executors and their fallback.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import box_checksum
from rlsys.weights.image import ImageTensor, tensors_in
from rlsys.weights.layout import shard_view, view_of
from rlsys.weights.segment import Segment
from rlsys.weights.target import Moved

ALIGN_BYTES = 64


@dataclass(frozen=True)
class GatherSpec:
    """The engines' dtypes by the trainer's names (what is not named is not wanted); `writer` is the trainer's rank."""

    dtypes: Mapping[str, str]
    names: Mapping[str, str]
    bucket_bytes: int
    writer: int = -1


@dataclass(frozen=True)
class Bucket:
    """A gathered bucket: where it lies, its tensors and their checksums."""

    path: str
    num_bytes: int
    tensors: tuple[ImageTensor, ...]
    sums: tuple[int, ...]


class Gatherer:
    """A trainer rank's side; `bucket` is collective over the trainer's ranks."""

    def __init__(self, spec: GatherSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self._buckets: Iterator[list[tuple[str, Tensor]]] = iter(())
        self._segment: Segment | None = None

    def send(self, version: int) -> None:
        """Begin anew."""
        self._buckets = self.engine.weights(self.spec.bucket_bytes)

    @torch.no_grad()
    def bucket(self, version: int) -> Bucket | bool:
        """The next bucket (on rank 0; True elsewhere), False when there is none."""
        gathered = next(self._buckets, None)
        if gathered is None or self.spec.writer:
            return gathered is not None
        wanted = [(name, tensor) for name, tensor in gathered if name in self.spec.dtypes]
        entries, end = list[ImageTensor](), 0
        for name, tensor in wanted:
            entries.append(ImageTensor(name, tuple(tensor.shape), self.spec.dtypes[name], end))
            end = -(-(end + entries[-1].num_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        segment = self._room(max(end, ALIGN_BYTES))
        image = tensors_in(segment.bytes, entries)
        for name, tensor in wanted:
            image[name].copy_(tensor)
        sums = tuple(box_checksum(t, (0,) * t.ndim, t.shape) for t in (image[name] for name, _ in wanted))
        return Bucket(segment.path, len(segment.bytes), tuple(entries), sums)

    def _room(self, num_bytes: int) -> Segment:
        if self._segment is None or len(self._segment.bytes) < num_bytes:
            if self._segment is not None:
                self._segment.close()
            self._segment = Segment.create(num_bytes)
        return self._segment

    def close(self) -> None:
        self._buckets = iter(())
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class Loader:
    """A rollout engine's side; the engine is quarantined from `receive` to `finish`."""

    def __init__(self, spec: GatherSpec, engine: RolloutEngine) -> None:
        self.spec, self.engine = spec, engine
        self.began: int | None = None
        self.loaded: set[str] = set()
        self.num_bytes = 0

    def receive(self, version: int) -> Moved:
        self.engine.begin_update()
        self.began, self.loaded, self.num_bytes = version, set(), 0
        return Moved(version, 0, 0.0, "")

    @torch.no_grad()
    def bucket(self, version: int, bucket: Bucket) -> None:
        """Load a bucket and check the elements that this rank holds of it."""
        if self.began != version:
            raise WeightTransferError(f"this engine has not begun weight version {version}")
        segment = Segment.open(bucket.path, bucket.num_bytes)
        try:
            image = tensors_in(segment.bytes, bucket.tensors)
            for (name, tensor), stated in zip(image.items(), bucket.sums, strict=True):
                if box_checksum(tensor, (0,) * tensor.ndim, tensor.shape) != stated:
                    raise WeightTransferError(f"tensor '{name}' that arrived is not the one that the trainer wrote")
            self.engine.load(list(image.items()))
            self._check(image)
            del image
        finally:
            segment.close()

    def _check(self, image: Mapping[str, Tensor]) -> None:
        layout, local = self.engine.weight_layout(), self.engine.local_tensors()
        for shard in layout.shards:
            whole = image.get(self.spec.names[shard.box.tensor])
            if whole is None:
                continue
            part, target = view_of(whole, shard.box.start, shard.box.shape), shard_view(local, shard)
            if not torch.equal(part.to(target.device, target.dtype), target):
                raise WeightTransferError(f"tensor '{shard.box.tensor}' that arrived is not the one that was loaded")
            self.loaded.add(shard.box.tensor)
            self.num_bytes += target.nbytes

    def finish(self, version: int) -> Moved:
        held = {shard.box.tensor for shard in self.engine.weight_layout().shards}
        if self.began != version or held - self.loaded:
            raise WeightTransferError(
                f"weight version {version} is not complete: {sorted(held - self.loaded)[:5]} lack"
            )
        started_s = time.monotonic()
        self.engine.finish_update(version)
        return Moved(version, self.num_bytes, time.monotonic() - started_s, "")

    def close(self) -> None:
        self.began = None
