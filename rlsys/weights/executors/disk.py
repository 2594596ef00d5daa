"""The disk executor: Hugging Face safetensors in one directory for each version, complete or absent.

Every trainer rank writes its own boxes into one mapped file beside the final place; rank 0 commits it by a rename.
Engines of this run read the boxes they hold; external servers load the directory as a model.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlsys.interfaces import RolloutEngine, TrainEngine
from rlsys.types import WeightLayout
from rlsys.utils.atomic import commit_dir, fsync_file, staging_dir, write_whole
from rlsys.utils.errors import WeightTransferError, raised_as
from rlsys.utils.safetensors_header import DTYPES, header
from rlsys.weights.checksum import add_checksums, box_checksum, digest, tensor_checksum
from rlsys.weights.engine_update import EngineUpdate
from rlsys.weights.executors.base import Executor, Layouts, RemainingTime
from rlsys.weights.layout import check_complete, element_bytes, shard_view, view_of, whole_shard
from rlsys.weights.plan import SOURCE_RANK, Copy, full_shapes, make_plan, resolve_names, source_dtypes
from rlsys.weights.shared_memory import SharedMemory, TensorHandle, pack_tensors, unpack_tensors

FILE, CHECKSUMS = "model.safetensors", "rlsys_checksums.json"


@dataclass(frozen=True)
class DiskSpec:
    """What one rank needs: the file's first bytes and its tensors, and the copies that this rank writes into it.

    `names` gives the file's name of each rollout tensor; `assets` is a folder whose small files are copied along.
    """

    root: str
    header: bytes
    num_bytes: int
    tensors: Mapping[str, TensorHandle]
    names: Mapping[str, str]
    assets: str = ""
    keep: int = 2
    writes: tuple[Copy, ...] = ()

    def directory(self, version: int) -> Path:
        return Path(self.root) / f"v{version}"

    @contextmanager
    def mapped(self, folder: Path) -> Iterator[dict[str, Tensor]]:
        """The tensors of the file in a folder."""
        with closing(SharedMemory.open(str(folder / FILE), self.num_bytes)) as memory:
            yield unpack_tensors(memory.bytes, self.tensors)


class DiskWriter:
    """A trainer rank; rank 0 prepares and commits."""

    def __init__(self, spec: DiskSpec, engine: TrainEngine) -> None:
        self.spec, self.engine = spec, engine

    def prepare(self, version: int) -> None:
        """Rank 0: an empty file of the full size beside the final place."""
        with (staging_dir(self.spec.directory(version)) / FILE).open("wb") as file:
            file.write(self.spec.header)
            file.truncate(self.spec.num_bytes)

    @torch.no_grad()
    def send(self, version: int) -> dict[str, int]:
        """Write this rank's boxes; returns their part of each tensor's checksum."""
        checksums: dict[str, int] = {}
        staging, local = self._staging(version), self.engine.local_tensors()
        with self.spec.mapped(staging) as tensors:
            for copy in self.spec.writes:
                target = view_of(tensors[copy.tensor], copy.start, copy.shape)
                target.copy_(copy.source_view(local))
                part = box_checksum(target, copy.start, tensors[copy.tensor].shape)
                checksums[copy.tensor] = checksums.get(copy.tensor, 0) + part
                del target
            tensors.clear()
        fsync_file(staging / FILE)
        return checksums

    def commit(self, version: int, checksums: Mapping[str, int]) -> None:
        """Rank 0: add the checksums and the assets, rename, remove old versions."""
        staging, final = self._staging(version), self.spec.directory(version)
        for asset in sorted(Path(self.spec.assets).glob("*")) if self.spec.assets else []:
            if asset.is_file() and asset.suffix in (".json", ".txt", ".model", ".jinja"):
                shutil.copyfile(asset, staging / asset.name)
                fsync_file(staging / asset.name)
        tensors = {name: f"{number:016x}" for name, number in checksums.items()}
        text = {"version": version, "digest": digest(checksums), "tensors": tensors}
        write_whole(staging / CHECKSUMS, json.dumps(text).encode(), durable=True)
        commit_dir(staging, final)
        held = [int(p.name[1:]) for p in final.parent.glob("v*") if p.name[1:].isdigit() and int(p.name[1:]) != version]
        for old in sorted(held)[: max(0, len(held) + 1 - self.spec.keep)]:
            shutil.rmtree(self.spec.directory(old))

    def _staging(self, version: int) -> Path:
        final = self.spec.directory(version)
        return final.with_name(final.name + ".tmp")

    def close(self) -> None:
        """Nothing is held between pushes."""


class DiskReader:
    """A rollout rank."""

    def __init__(self, spec: DiskSpec, engine: RolloutEngine) -> None:
        self.spec, self.update = spec, EngineUpdate(engine)

    def receive(self, version: int) -> int:
        """Bring the engine to a committed version: quarantine, copy, check, release."""
        local = self.update.begin()
        folder = self.spec.directory(version)
        with raised_as(WeightTransferError, f"{folder} holds no complete weights", OSError, ValueError):
            written = json.loads((folder / CHECKSUMS).read_text())
        if written.get("version") != version:
            raise WeightTransferError(f"{folder} holds weight version {written.get('version')}")
        checksums = {name: int(text, 16) for name, text in written["tensors"].items()}
        with self.spec.mapped(folder) as tensors:
            num_bytes = self._read(tensors, local, checksums)
            tensors.clear()
        self.update.finish(version)
        return num_bytes

    @torch.no_grad()
    def _read(self, tensors: Mapping[str, Tensor], local: Mapping[str, Tensor], checksums: Mapping[str, int]) -> int:
        """Check the tensors of this rank's shards in the file and copy the shards; returns their bytes."""
        checked, num_bytes = set[str](), 0
        for shard in self.update.layout.shards:
            name = self.spec.names[shard.box.tensor]
            whole, target = tensors[name], shard_view(local, shard)
            if name not in checked and tensor_checksum(whole) != checksums[name]:
                raise WeightTransferError(f"tensor '{name}': the received values differ from the trainer's")
            checked.add(name)
            target.copy_(view_of(whole, shard.box.start, shard.box.shape))
            num_bytes += target.nbytes
        return num_bytes

    def close(self) -> None:
        """Nothing is held between pushes."""


class DiskExecutor(Executor):
    """`disk`: a committed directory for each version."""

    reader: DiskSpec

    def connect(self, sources: Layouts, destinations: Layouts, remaining_s: RemainingTime) -> None:
        """The file holds every tensor that an engine wants, whole, in the engines' dtype (the first engine's where they
        differ); the widest dtypes come first, so that elements are aligned without holes."""
        check_complete(destinations)
        names, shapes = resolve_names(sources, destinations), full_shapes(sources)
        dtypes = source_dtypes(names, destinations)
        order = sorted(dtypes, key=lambda name: (-element_bytes(dtypes[name]), name))
        packed, num_bytes = pack_tensors(((name, shapes[name], dtypes[name]) for name in order), align_bytes=1)
        shards = tuple(whole_shard(name, t.shape, name) for name, t in packed.items())
        plan = make_plan(sources, [WeightLayout(0, "", shards, {name: shapes[name] for name in order}, dtypes)])
        first_bytes = header((name, DTYPES[t.dtype], t.shape, t.num_bytes) for name, t in packed.items())
        begin = len(first_bytes)
        tensors = {name: replace(t, offset=t.offset + begin // element_bytes(t.dtype)) for name, t in packed.items()}
        self.reader = DiskSpec(str(self.options.disk_root), first_bytes, begin + num_bytes, tensors, names)
        self.unused = plan.unused
        giving = plan.moves[:, SOURCE_RANK]
        writers = [
            replace(self.reader, assets=self.options.disk_assets, writes=plan.select(giving == rank))
            for rank in range(len(sources))
        ]
        self.open(self.source, writers, remaining_s)
        self.open(self.destination, [self.reader] * self.destination.world_size, remaining_s)

    def push(self, version: int, remaining_s: RemainingTime) -> tuple[int, str]:
        call_first = self.source.execute_rank_async
        call_first(0, "weight_step", "prepare", version).get(remaining_s())
        parts: list[Mapping[str, int]] = self.send(version, remaining_s)
        names = {name for part in parts for name in part}
        checksums = {name: add_checksums([part.get(name, 0) for part in parts]) for name in names}
        call_first(0, "weight_step", "commit", version, checksums).get(remaining_s())
        return self.receive(version, remaining_s), digest(checksums)

    def restore(self, rank: int, version: int, remaining_s: RemainingTime) -> None:
        self.reopen(rank, version, self.reader, remaining_s)
