"""The slow path: full tensors gathered bucket by bucket and loaded through the engine's own loader.

The trainer's ranks gather together, the first one of each host puts each bucket into shared memory, every engine of the
host loads it. It needs nothing but `weights()` and `load()`: the other executors are tested against it and fall back to
it.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.utils.errors import WeightTransferError
from rlsys.weights.checksum import digest, tensor_checksum
from rlsys.weights.executors.base import Executor, Layouts, RemainingTime, wait_all
from rlsys.weights.layout import shard_view, view_of
from rlsys.weights.plan import resolve_names, source_dtypes
from rlsys.weights.shared_memory import SharedMemory, TensorHandle, pack_tensors, unpack_tensors


@dataclass(frozen=True)
class GatherSpec:
    """The engines' dtypes by the trainer's names (tensors without one are not wanted).

    A trainer rank that `writes` shares its buckets.
    """

    dtypes: Mapping[str, str]
    names: Mapping[str, str]
    bucket_bytes: int
    writes: bool = False


@dataclass(frozen=True)
class Bucket:
    """Gathered tensors in shared memory, and their checksums."""

    path: str
    num_bytes: int
    tensors: Mapping[str, TensorHandle]
    checksums: tuple[int, ...]


class GatherSender:
    """A trainer rank; `bucket` is collective over the trainer's ranks."""

    def __init__(self, spec: GatherSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine
        self._buckets: Iterator[list[tuple[str, Tensor]]] = iter(())
        self._memory = ExitStack()  # closes that of the last bucket

    def send(self, version: int) -> None:
        """Start again from the first bucket."""
        self._buckets = self.engine.weights(self.spec.bucket_bytes)

    @torch.no_grad()
    def bucket(self, version: int) -> Bucket | bool:
        """The next bucket, True from a rank that does not write; False when there are no more."""
        gathered = next(self._buckets, None)
        if gathered is None or not self.spec.writes:
            return gathered is not None
        wanted = {name: tensor for name, tensor in gathered if name in self.spec.dtypes}
        packed, num_bytes = pack_tensors((n, tuple(t.shape), self.spec.dtypes[n]) for n, t in wanted.items())
        self._memory.close()
        memory = self._memory.enter_context(closing(SharedMemory.create(num_bytes)))
        tensors = unpack_tensors(memory.bytes, packed)
        for name, tensor in wanted.items():
            tensors[name].copy_(tensor)
        return Bucket(memory.path, num_bytes, packed, tuple(map(tensor_checksum, tensors.values())))

    def close(self) -> None:
        self._buckets = iter(())
        self._memory.close()


class GatherLoader:
    """A rollout rank; its engine is quarantined from `receive` to `finish`."""

    def __init__(self, spec: GatherSpec, engine: RolloutEngine) -> None:
        self.spec, self.engine = spec, engine
        self.version: int | None = None
        self.loaded: set[str] = set()
        self.num_bytes = 0

    def receive(self, version: int) -> int:
        """Quarantine the engine; the weights come by `bucket`."""
        self.engine.begin_update()
        self.version, self.loaded, self.num_bytes = version, set(), 0
        return 0

    @torch.no_grad()
    def bucket(self, version: int, bucket: Bucket) -> None:
        """Load a bucket and check the elements that this rank holds of it."""
        if self.version != version:
            raise WeightTransferError(f"this engine is not receiving weight version {version}")
        with closing(SharedMemory.open(bucket.path, bucket.num_bytes)) as memory:
            tensors = unpack_tensors(memory.bytes, bucket.tensors)
            for (name, tensor), checksum in zip(tensors.items(), bucket.checksums, strict=True):
                if tensor_checksum(tensor) != checksum:
                    raise WeightTransferError(f"tensor '{name}': the received values differ from the trainer's")
            self.engine.load(list(tensors.items()))
            self._check(tensors)
            tensors.clear()

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        layout, local = self.engine.weight_layout(), self.engine.local_tensors()
        for shard in layout.shards:
            whole = tensors.get(self.spec.names[shard.box.tensor])
            if whole is None:
                continue
            part, held = view_of(whole, shard.box.start, shard.box.shape), shard_view(local, shard)
            if not torch.equal(part.to(held.device, held.dtype), held):
                raise WeightTransferError(f"tensor '{shard.box.tensor}': the engine's values are not those it loaded")
            self.loaded.add(shard.box.tensor)
            self.num_bytes += held.nbytes

    def finish(self, version: int) -> int:
        """Release the engine; returns the bytes that it loaded. WeightTransferError where a tensor is missing."""
        missing = {shard.box.tensor for shard in self.engine.weight_layout().shards} - self.loaded
        if self.version != version or missing:
            raise WeightTransferError(f"weight version {version} is incomplete: missing {sorted(missing)[:5]}")
        self.engine.finish_update(version)
        return self.num_bytes

    def close(self) -> None:
        self.version = None


class GatherExecutor(Executor):
    """`gather`: full tensors, bucket by bucket."""

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        names = resolve_names(sources, destinations)
        spec = GatherSpec(source_dtypes(names, destinations), names, self.options.bucket_bytes)
        writers = {layout.host: layout.rank for layout in reversed(sources)}
        if alone := sorted({layout.host for layout in destinations} - {*writers}):
            raise WeightTransferError(f"gather needs a trainer rank on every rollout host; there is none on {alone}")
        self.writers = [writers[layout.host] for layout in destinations]
        specs = [replace(spec, writes=rank in writers.values()) for rank in range(self.source.world_size)]
        self.open(self.source, specs, remaining_s)
        self.open(self.destination, [spec] * self.destination.world_size, remaining_s)

    def push(self, version: int, remaining_s: RemainingTime) -> tuple[int, str]:
        self.send(version, remaining_s)
        self.receive(version, remaining_s)
        checksums: dict[str, int] = {}
        while (buckets := self.step(self.source, remaining_s, "bucket", version))[0]:
            loads = [
                self.destination.execute_rank_async(rank, "weight_step", "bucket", version, buckets[writer])
                for rank, writer in enumerate(self.writers)
            ]
            checksums |= dict(zip(buckets[0].tensors, buckets[0].checksums, strict=True))
            wait_all(loads, remaining_s)
        return sum(self.step(self.destination, remaining_s, "finish", version)), digest(checksums)
